"""`slo-bench capture`: a pass-through before a server that writes the trace of its requests."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...workloads.errors import SloBenchError
from ..options.parameters import OUT, allow_host, argument, flag, option

if TYPE_CHECKING:
    from ...harness.servers.gateway.captured_rows import CaptureFile

EXAMPLES = (
    "slo-bench capture http://127.0.0.1:8000",
    "slo-bench capture http://127.0.0.1:8000 --port 9000 --out monday.jsonl --share",
    "slo-bench capture https://api.example.com/v1 --duration 3600 --out hour.jsonl",
)
_LOOK_EVERY_S = 0.2
_SALT_BYTES = 16


def capture(
    url: str = argument("URL", "Address of a server with the OpenAI API: http://host:8000."),
    out: Path = option(
        "FILE", "Trace to write, a JSON object a line.", *OUT, default=Path("capture.jsonl")
    ),
    port: int = option("N", "Port on this machine. 0: a free one.", default=0, min=0, max=65535),
    host: str = option(
        "ADDRESS",
        "Address to listen at; at others than this machine's, everybody there reaches the server.",
        default="127.0.0.1",
    ),
    names: list[str] | None = allow_host(),
    duration: float | None = option("S", "Time to capture. Default: until Ctrl-C.", min=0.1),
    block_size: int = option(
        "N", "Tokens in a block of a prompt that is hashed: 16 or 512, say.", default=16, min=1
    ),
    share: bool = flag(
        "Keep only what a replay needs: models and blocks are numbered, and paths, statuses and "
        "latencies are left out."
    ),
    salt: Path | None = option(
        "FILE",
        "File with the salt of the hashes, made if it is not there: captures of one salt have "
        "equal hashes for equal prompts. Default: a random salt that is not kept.",
    ),
) -> None:
    """Pass requests on to a server and write when they came, how long they were and what they
    share, never their content.

    Clients use the printed address in place of the server's. The file is a workload:
    `slo-bench run --workload FILE`.
    """
    import signal

    from ...harness.load_generator.http.endpoint import Endpoint, is_loopback
    from ...harness.servers.gateway.capture import capturing
    from ...harness.servers.gateway.captured_prompts import PromptBlocks
    from ...harness.servers.gateway.captured_rows import CaptureFile
    from ...workloads.readers.tables import BLOCK_SIZES
    from .serve_until_stopped import say, stop_on_signals

    endpoint = Endpoint.parse(url)
    if salt is not None and share:
        raise SloBenchError("--share numbers the blocks, which have no salt: leave --salt out")
    if block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, sorted(BLOCK_SIZES)))
        raise SloBenchError(f"--block-size must be one of {sizes}, which a replay recognises")
    blocks = PromptBlocks(block_size, _salt(salt), numbered=share)
    stop_on_signals(signal.SIGTERM, signal.SIGHUP)
    file = CaptureFile(out, blocks, share=share)
    try:
        allowed = tuple(names or ())
        with capturing(endpoint, file, host=host, port=port, names=allowed) as address:
            typer.echo(f"{address}{endpoint.version}")
            if not is_loopback(host):
                say(f"everybody who reaches {host} reaches {endpoint.url} through it")
            say(f"requests are passed on to {endpoint.url} and written to {out}; Ctrl-C stops")
            end_s = None if duration is None else time.monotonic() + duration
            while end_s is None or time.monotonic() < end_s:
                time.sleep(_LOOK_EVERY_S)
    except KeyboardInterrupt:
        pass
    finally:
        file.close()
        for line in _lines(file):
            say(line)


def _salt(path: Path | None) -> bytes:
    """The salt in a file, or a new one, which is written there.

    Raises:
        SloBenchError: the file cannot be read or written, or holds no salt.
    """
    if path is None:
        return secrets.token_bytes(_SALT_BYTES)
    try:
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(_SALT_BYTES) + "\n", "utf-8")
        salt = bytes.fromhex(path.read_text("utf-8"))
    except ValueError:
        salt = b""
    except OSError as error:
        raise SloBenchError(f"cannot use --salt {path}: {error.strerror or error}") from None
    if len(salt) < _SALT_BYTES:
        raise SloBenchError(f"--salt {path} must hold {2 * _SALT_BYTES} hexadecimal digits")
    return salt[:64]


def _lines(file: CaptureFile) -> list[str]:
    counts = file.outcomes
    rows = f"{counts.total():,} request{'s' * (counts.total() != 1)}"
    others = [f"{counts[name]:,} {name}" for name in counts if name != "ok"]
    lines = [f"{rows} in {file.path}{': ' * bool(others)}{', '.join(others)}"]
    if file.lost:
        lines.append(f"{len(file.lost):,} rows could not be written: {file.lost[0]}")
    if counts["ok"]:
        lines.append(f"replay: slo-bench run --workload {file.path} --replay-speed 1")
    return lines
