"""Files of a plan: a shell script that starts its servers, and its experiment."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from ...harness.experiments.backends.deployment_manifests import (
    GPUS_OF_A_HOST,
    PORT,
    model_reference,
    write_deployment,
)
from ...harness.experiments.config.schema import ExperimentSchema
from ...harness.policies.systems import system as system_by_name
from ...harness.servers.launch.command_line import flags_of
from ...harness.servers.launch.compatibility import refusal
from ...harness.servers.launch.server_flags import PARAMETER
from ...harness.servers.launch.server_kind import ServerKind
from ...harness.servers.server_kinds import server_kinds
from ...predictors.specs import model
from ...workloads.errors import SloBenchError
from ...workloads.whole_file import write_whole
from .offers import Offer, Value
from .plan_search import SizedOffer, TargetLoad
from .prices import PriceList

_SIXTEEN_BIT = ("bf16", "fp16")

_SCRIPT = """\
#!/usr/bin/env bash
# {what}{weights}
# Simulated: {attainment:.1%} of requests in SLO at {rate:g} req/s. Measure before you trust it.
# On each host: ./launch.sh HOST, where HOST counts from 0 ({hosts} in all, {per_host} a host).
# MODEL=path-or-name chooses other weights, ADDRESS=0.0.0.0 accepts remote clients.
set -euo pipefail
MODEL=${{MODEL:-{model}}}
ADDRESS=${{ADDRESS:-127.0.0.1}}
host=${{1:-0}}
trap 'kill 0' INT TERM
for ((k = host * {per_host}; k < (host + 1) * {per_host} && k < {instances}; k++)); do
  first=$(((k % {per_host}) * {gpus}))
  CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + {gpus} - 1))) \\
    {command} &
done
wait
"""

_ROLES = """\
#!/usr/bin/env bash
# {what}{weights}
# Simulated: {attainment:.1%} of requests in SLO at {rate:g} req/s. Measure before you trust it.
# One host with {all_gpus} GPUs; slo-bench starts all instances and a gateway.
set -euo pipefail
MODEL=${{MODEL:-{model}}}
exec {command}
"""


def write_launch_files(
    folder: Path, requested: ExperimentSchema, load: TargetLoad, plan: SizedOffer, prices: PriceList
) -> list[Path]:
    """Write those of a plan: `experiment.toml` and, if a real server runs its system, `launch.sh`;
    a server as it is has the files of `write_deployment` too.

    Raises:
        SloBenchError: they cannot be written.
    """
    experiment = plan.experiment(requested, load.rate_rps)
    of_servers = type(experiment.server)()  # a simulation has no use for theirs
    changed = {"records": requested.records, "name": "plan", "server": of_servers}
    kept = experiment.model_copy(update=changed)
    files = {folder / "experiment.toml": kept.to_toml()}
    script = launch_script(requested, load, plan, prices)
    if script is not None:
        files[folder / "launch.sh"] = script
    for path, text in files.items():
        write_whole(path, [text.encode()])
    if script is None:
        return list(files)
    (folder / "launch.sh").chmod(0o755)
    comment = f"{requested.model[0]}: {plan.instances} × {plan.offer.name}, simulated"
    return [*files, *write_deployment(folder, experiment, comment)]


def launch_script(
    requested: ExperimentSchema, load: TargetLoad, plan: SizedOffer, prices: PriceList
) -> str | None:
    """Shell script that starts the servers of a plan; None if no real server runs its system."""
    system = system_by_name(plan.offer.system)
    kinds = {name: kind for name, kind in server_kinds().items() if kind.command}
    able = (kind for name, kind in kinds.items() if refusal(system, name) is None)
    kind = kinds.get(system.name) or next(able, None)
    if kind is None:
        return None
    fields = {
        "what": f"{requested.model[0]}: {plan.instances} × {plan.offer.name}, {plan.gpus} GPUs\n"
        f"# Weights {plan.offer.weight_dtype}, KV cache {plan.offer.kv_dtype}; "
        f"{plan.usd_per_hour:.2f} USD per hour ({prices.title}).",
        "attainment": plan.verdict.attainment,
        "rate": load.whole_rps,
        "model": shlex.quote(model_reference(requested.model[0])),
    }
    published = model(requested.model[0]).checkpoint_dtype
    deployment, fields["weights"] = _deployment(plan.offer, kind, published)
    ep = plan.offer.deployment.get("ep", requested.ep[0])
    try:
        spread = [*kind.parallel_args(plan.offer.tp, plan.offer.pp, int(ep), plan.offer.dp)]
        spread += deployment
    except SloBenchError:  # it does not share experts out like that
        return None
    if system.cluster is not None:
        words = ["slo-bench serve", system.name, "--backend", kind.name, '--model "$MODEL"']
        words += _parameters(plan.parameters)
        words += [f"--server-arg={word}" for word in spread]
        return _ROLES.format(**fields, all_gpus=plan.gpus, command=" ".join(words))
    if system.name == kind.name:
        words = [kind.command, '--host "$ADDRESS"', f"--port $(({PORT} + k))", *spread]
        settings = {
            **{f"{PARAMETER}{name}": value for name, value in plan.parameters.items()},
            "server.max_model_tokens": requested.server.max_model_tokens,
        }
        for flag in dict.fromkeys(flags_of(kind).values()):
            value = settings.get(flag.setting)
            if value is not None and flag.write is not None:
                words += flag.write(value, {"dp": plan.offer.dp})
    else:
        words = ["slo-bench serve", system.name, "--backend", kind.name, '--model "$MODEL"']
        words += [f"--port $(({PORT} + k))", *_parameters(plan.parameters)]
        words += [f"--server-arg={word}" for word in spread]
    per_host = max(1, GPUS_OF_A_HOST // plan.offer.gpus)
    return _SCRIPT.format(
        **fields,
        hosts=-(-plan.instances // per_host),
        per_host=per_host,
        instances=plan.instances,
        gpus=plan.offer.gpus,
        command=" ".join(words),
    )


def _deployment(offer: Offer, kind: ServerKind, published: str) -> tuple[list[str], str]:
    """Options for memory and formats of weights and KV cache, and a comment on what has none."""
    words = [kind.memory_option, f"{offer.memory_share:g}"] if kind.memory_option else []
    comment = ""
    if offer.weight_dtype not in (published, *_SIXTEEN_BIT):
        option = kind.weight_options.get(offer.weight_dtype)
        if option is None:
            comment = f"\n# MODEL must be a checkpoint with {offer.weight_dtype} weights."
        words += option or ()
    words += kind.kv_options.get(offer.kv_dtype, ())
    return words, comment


def _parameters(parameters: Mapping[str, Value]) -> list[str]:
    return [f"--set {name}={str(value).lower()}" for name, value in parameters.items()]
