"""An embedding server beside a language model's server, on the same device."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....workloads.child_process import ChildProcess
from ....workloads.errors import SloBenchError
from ...load_generator.machine import started_on
from ..plugin.contract import EmbedderBeside

_MODULE = f"{__package__}.torch_embeddings"
_STOP_S = 20.0


@dataclass(frozen=True)
class EmbeddingServer:
    """A running embedding server. `beside` is what a policy inside the language model's server is
    told of it.
    """

    name: str
    url: str
    beside: EmbedderBeside
    _child: ChildProcess

    def problem(self) -> str | None:
        """What became of a server that has ended; None while it runs."""
        code = self._child.process.poll()
        return None if code is None else f"the embedding server ended with exit code {code}"


@contextlib.contextmanager
def embedding_server(model: str, device: str, cores: Sequence[int]) -> Iterator[EmbeddingServer]:
    """Serve the encoder in the folder `model` for as long as the block lasts.

    Raises:
        SloBenchError: it is no folder of an encoder, or the server does not start.
    """
    if not (Path(model) / "config.json").is_file():
        raise SloBenchError(
            f"the embedder of a started server is the folder of an encoder, but {model} has no "
            "config.json"
        )
    with tempfile.TemporaryDirectory(prefix="slo-bench-embed-") as folder:
        with started_on(cores):
            child = ChildProcess(_MODULE)
        try:
            child.send({"folder": str(Path(model).resolve()), "device": device})
            ready_message = child.receive()
            if ready_message is None:
                raise SloBenchError("the embedding server did not start; its error is shown above")
            beside = EmbedderBeside(
                f"{folder}/scheduler", ready_message["activation_bytes_per_token"]
            )
            yield EmbeddingServer(Path(model).resolve().name, ready_message["url"], beside, child)
        finally:
            child.stop(_STOP_S)
