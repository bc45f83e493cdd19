"""`slo-bench run`: an experiment from a file, a suite or options, with report."""

from __future__ import annotations

import json

import typer

from ...workloads.errors import SloBenchError
from ..options import declared as options

EXAMPLES = (
    "slo-bench run",
    "slo-bench run --system vllm --system sarathi --workload azure-conv --rates 2:10:2",
    "slo-bench run --model llama-3-70b --gpu h100-80g --gpus 8 --router least-loaded --seeds 1",
    "slo-bench run --system sarathi --sweep sarathi.chunk_tokens=512,2048 --requests 300",
    "slo-bench run --suite quickstart --out results --jobs 2",
    "slo-bench run --suite quickstart --executor ray --address 10.0.0.1:6379",
    "slo-bench run --resume --out results",
    "slo-bench run --base-url http://127.0.0.1:8000 --rates 1,2,4 --requests 200 --seeds 1",
    "slo-bench run --base-url http://10.0.0.9:8000 --rates 500,1000 --executor ray --address auto",
)


def run(
    file: options.File = None,
    suite: options.Suite = None,
    system: options.System = None,
    sweep: options.Sweep = None,
    workload: options.Workload = None,
    arrivals: options.Arrivals = None,
    rates: options.Rates = None,
    load_factors: options.LoadFactors = None,
    replay_speed: options.ReplaySpeed = None,
    requests: options.Requests = None,
    duration: options.Duration = None,
    warmup: options.Warmup = None,
    slo: options.Slo = None,
    slo_scale: options.SloScale = None,
    seeds: options.Seeds = None,
    seed: options.Seed = None,
    model: options.Model = None,
    gpu: options.Gpu = None,
    gpus: options.Gpus = None,
    tp: options.Tp = None,
    pp: options.Pp = None,
    device_map: options.DeviceMap = None,
    instances: options.Instances = None,
    router: options.Router = None,
    failures: options.Failures = None,
    embedder: options.Embedder = None,
    models: options.Models = None,
    profile: options.Profile = None,
    length_predictor: options.LengthPredictor = None,
    overlong_requests: options.OverlongRequests = None,
    backend: options.Backend = None,
    base_url: options.BaseUrl = None,
    api: options.Api = None,
    header: options.Header = None,
    api_key_env: options.ApiKeyEnv = None,
    body: options.Body = None,
    prompt_format: options.PromptFormat = None,
    tokenizer: options.Tokenizer = None,
    server_arg: options.ServerArg = None,
    time_limit: options.TimeLimit = None,
    processes: options.Processes = None,
    save_token_times: options.SaveTokenTimes = False,
    export: options.Export = None,
    validate: options.Validate = False,
    out: options.Out = None,
    resume: options.Resume = False,
    jobs: options.Jobs = None,
    executor: options.Executor = "local",
    address: options.Address = None,
    records: options.Records = None,
    no_report: options.NoReport = False,
    as_json: options.AsJson = False,
) -> None:
    """Run an experiment: every system at every rate and seed. Writes a folder with a report."""
    given = dict(locals())
    from ...harness.validation.run_replay import validate_run
    from ...predictors.profiles.profile import read_profile
    from ..options.executor import executor_of
    from ..options.experiment import asked_experiment
    from ..output.run import run_shown, summarise, write_page
    from ..output.validated_run import levels_shown, validated

    judged = profile if validate else None
    if validate:
        given["profile"] = None  # judged, and no setting of the experiment
    experiment = asked_experiment(given)
    if validate or experiment.server.validated:
        experiment = validated(experiment, judged)
        validate = True
    result = run_shown(
        experiment, out, jobs=jobs, executor=executor_of(executor, address), resume=resume
    )
    nothing_to_show = not any(row["valid"] for row in result.rows())
    levels, problem = [], None
    if validate:
        try:
            levels = validate_run(result.folder, None if judged is None else read_profile(judged))
        except SloBenchError as error:
            problem = error  # what was measured is shown all the same
    page = None if no_report or nothing_to_show else write_page(result)
    if as_json:
        rows = [row for level in levels for row in level.rows()] if validate else result.rows()
        typer.echo(json.dumps(rows, allow_nan=False))
    else:
        summarise(result, page)
    if problem is not None:
        raise problem
    if levels and not as_json:
        levels_shown(levels)
