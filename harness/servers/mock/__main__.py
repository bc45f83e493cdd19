"""Command line of the mock server: `python -m slo_bench.harness.servers.mock`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable

from ....workloads.child_process import Parent
from ....workloads.errors import SloBenchError
from .mock_config import InjectedFault, MockConfig
from .running_mock import serve_until_interrupted


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slo_bench.harness.servers.mock",
        description="An OpenAI-compatible server with known times. Prints its address.",
    )
    default = MockConfig()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument("--ttft", dest="ttft_s", type=float, default=default.ttft_s, help="seconds")
    parser.add_argument("--itl", dest="itl_s", type=float, default=default.itl_s, help="seconds")
    parser.add_argument("--slots", type=int, help="served at once; default: all")
    parser.add_argument(
        "--service", dest="service_s", type=float, help="seconds that any answer takes in its slot"
    )
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--answer-tokens", type=int, help="default: as many as a request allows")
    parser.add_argument("--model", default=default.model, help="the name it gives itself")
    parser.add_argument("--fault", choices=[fault.value for fault in InjectedFault])
    parser.add_argument("--fault-every", type=int, default=1, help="which requests it happens to")
    parser.add_argument("--fault-after", type=int, default=default.fault_after, help="tokens")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Serve the mock until interrupted."""
    arguments = _parser().parse_args()
    say: Callable[[str], object] = functools.partial(print, flush=True)
    try:
        settings = {
            setting.name: getattr(arguments, setting.name)
            for setting in dataclasses.fields(MockConfig)
        }
        if arguments.child:
            parent = Parent()
            sent = next(parent.messages(), None)
            if sent is None:
                return  # the parent ended before it said anything
            settings = sent
            parent.exit_with()
            say = parent.send
        fault = settings.pop("fault")
        config = MockConfig(**settings, fault=None if fault is None else InjectedFault(fault))
        with contextlib.suppress(KeyboardInterrupt):
            serve_until_interrupted(config, arguments.host, arguments.port, say)
    except (SloBenchError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
