"""`slo-bench backends`: servers, each in an environment of its own."""

from __future__ import annotations

import json

import typer

from ...harness.servers.server_kinds import LAUNCHED
from ..options.parameters import argument, epilog, flag, option

app = typer.Typer(
    help="Install, list, check and remove servers, each in an environment of its own.",
    no_args_is_help=True,
    epilog=epilog(["slo-bench backends install vllm --cpu", "slo-bench backends list"]),
)


@app.command(
    epilog=epilog(
        [
            "slo-bench backends install vllm --cpu",
            "slo-bench backends install vllm --with nixl",
            "slo-bench backends install sglang --cpu",
        ]
    )
)
def install(
    backend: str = argument("BACKEND", f"Server: {' or '.join(LAUNCHED)}."),
    cpu: bool = flag("Install the build for machines without a GPU.", "--cpu"),
    version: str | None = option(
        "V", "Server version. Default: the version that slo-bench is tested with."
    ),
    packages: list[str] | None = option(
        "PACKAGE",
        "Additional package, such as nixl; also added to an existing installation. May be "
        "repeated.",
        "--with",
    ),
    verbose: bool = flag("Show the installer's output.", "--verbose", "-v"),
) -> None:
    """Install a server; takes minutes and gigabytes. Uses uv if there is one, else venv and pip."""
    from ...harness.servers.launch import environments
    from ...harness.servers.server_kinds import server_kind

    def say(line: str) -> None:
        if verbose or not line.startswith(" "):
            typer.echo(line, err=True)

    environment = environments.install(
        server_kind(backend, LAUNCHED),
        "cpu" if cpu else "cuda",
        version=version,
        packages=packages or (),
        say=say,
    )
    typer.echo(environment.path)


@app.command("list", epilog=epilog(["slo-bench backends list --json"]))
def list_backends(
    as_json: bool = flag("Print a JSON list.", "--json"),
) -> None:
    """List installed and available servers."""
    from ...harness.servers.launch import environments
    from ...harness.servers.server_kinds import server_kinds, server_problems

    rows = [
        {"name": e.name, "state": "installed", "path": str(e.path)}
        for e in environments.installed()
    ]
    rows += [
        {"name": path.name, "state": "unfinished", "path": str(path)}
        for path in environments.unfinished()
    ]
    rows += [
        {
            "name": f"{e.backend}-{e.version}-{e.device}",
            "state": environments.THIS,
            "path": str(e.path),
        }
        for e in environments.beside_us()
    ]
    there = {row["name"] for row in rows}
    for problem in server_problems():
        typer.echo(problem, err=True)
    for server, kind in server_kinds().items():
        for device, build in kind.builds.items():
            name = f"{server}-{build.version}-{device}"
            if name not in there:
                rows.append({"name": name, "state": "can be installed", "path": ""})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from ..output.console import print_result, text_table

    lines = [list(row.values()) for row in rows]
    print_result(text_table(("name", "state", "path"), lines, unbroken=("name", "state")))


@app.command(
    epilog=epilog(["slo-bench backends check vllm", "slo-bench backends check vllm==0.31.0"])
)
def check(
    backend: str = argument("BACKEND", f"Server: {', '.join(LAUNCHED)}, or vllm==V."),
    as_json: bool = flag("Print only JSON.", "--json"),
) -> None:
    """Check that the plugin fits a server: every function that it uses is there and takes the
    parameters that it expects. Exits with 1 if not. A version that is not installed is fetched
    without its dependencies.
    """
    import dataclasses

    from ...harness.servers.launch.check_hooks import check_hooks

    plugin_check = check_hooks(backend)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(plugin_check)))
    elif plugin_check.problems:
        typer.echo(
            f"{plugin_check.environment}: the plugin does not fit version {plugin_check.version}"
        )
        for problem in plugin_check.problems:
            typer.echo(f"  {problem}")
    else:
        typer.echo(
            f"{plugin_check.environment}: all {plugin_check.targets} functions are as the plugin "
            "expects"
        )
    if plugin_check.problems:
        raise typer.Exit(1)


@app.command(epilog=epilog(["slo-bench backends remove vllm-0.32.0-cpu"]))
def remove(
    name: str = argument("NAME", "Environment name, or a server name for all its environments."),
) -> None:
    """Delete the environments of installed servers."""
    from ...harness.servers.launch import environments

    for path in environments.remove(name):
        typer.echo(f"removed {path}", err=True)
