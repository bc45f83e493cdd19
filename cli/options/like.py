"""`--like`: settings of a deployment that somebody runs, below those that are given."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import typer

from .from_schema import Given


def with_like(options: Given, searched: Collection[str] = ()) -> Given:
    """What was given, with the settings of the deployment of `--like` where it says no other; not
    those of `searched`, which the command chooses.

    Raises:
        SloBenchError: the deployment cannot be read.
    """
    if options.like is None:
        return options
    from ...harness.servers.launch.backend_names import SIMULATED
    from ...harness.servers.launch.described_deployment import described
    from ...harness.servers.server_kinds import LAUNCHED

    deployment = described(options.like, has_model="model" in options.settings)
    read = {"tp": 1, **deployment.settings}  # a server's own default
    settings = {name: value for name, value in read.items() if name not in searched}
    is_launched = options.settings.get("backend", SIMULATED) in LAUNCHED
    keeps = is_launched or "gpu" in searched  # by `plan`, which writes files that start servers
    of_servers = [] if keeps else [name for name in settings if name.startswith("server.")]
    for name in of_servers:
        del settings[name]
    system = {} if "systems" in searched else {"systems": (deployment.system,)}
    settings = {**system, **settings, **options.settings}
    systems = settings.get("systems", (deployment.system,))
    named = {text.partition("=")[0].rpartition(".")[2] for text in (*options.sets, *options.sweeps)}
    for name in named & deployment.settings.keys() - options.settings.keys():
        del settings[name]
    lines = list(deployment.lines)
    if left := [name for name in deployment.settings if name in searched]:
        lines.append(f"chosen by this command: {', '.join(left)}")
    sets = list(options.sets)
    parameters = {k: v for k, v in deployment.parameters.items() if k not in named}
    if deployment.system in systems:
        sets += [f"{deployment.system}.{name}={value}" for name, value in parameters.items()]
    elif parameters:
        lines.append(f"{', '.join(parameters)}: not those of {', '.join(systems)}")
    if of_servers:
        lines.append(f"of started servers alone: {', '.join(of_servers)}")
    for line in lines:
        typer.echo(f"--like: {line}", err=True)
    return replace(options, settings=settings, sets=tuple(sets), like=None)
