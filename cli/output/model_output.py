"""What `slo-bench model show` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...reports.terminal.screen import Screen
from .console import print_lines, print_result, text_table

_GIB = 2**30


def print_model(facts: Mapping[str, Any]) -> None:
    """Print the model as it was read and, where `facts` has `memory`, what fits."""
    layers = [f"{count} {kind}" for kind, count in facts["layers_by_kind"].items()]
    by_kind = facts["kv_bytes_per_token_by_kind"]
    kv = f"{facts['kv_bytes_per_token']:,} bytes"
    if len(by_kind) > 1:
        kv += f" ({', '.join(f'{kind} {count:,}' for kind, count in by_kind.items())})"
    encoder = facts["image_encoder_parameters"]
    rows = [
        ("model", f"{facts['model']} ({facts['family']})"),
        ("parameters", _billions(facts["parameters"])),
        ("of these a token's", _billions(facts["active_parameters"])),
        ("image encoder's", _billions(encoder) if encoder else None),
        ("layers", f"{facts['layers']}: {'; '.join(layers)}"),
        ("width", f"{facts['hidden']:,}, vocabulary {facts['vocab']:,}"),
        ("heads", f"{facts['heads']}, KV {facts['kv_heads']}, {facts['head_dim']} wide"),
        ("context", f"{facts['context_tokens']:,} tokens"),
        ("checkpoint", f"weights {facts['checkpoint_dtype']}, KV {facts['checkpoint_kv_dtype']}"),
        (f"KV a token ({facts['kv_dtype']})", kv if by_kind else "none"),
        ("state a sequence", _states(facts["state_bytes_per_sequence"])),
        ("prefix blocks", _blocks(facts["prefix_block_tokens"])),
        ("origin", str(facts["origin"])),
    ]
    print_result(_table(rows))
    if "memory" in facts:
        print_lines("")
        print_result(_table(_memory_rows(facts["memory"])))


def _memory_rows(memory: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    weights = f"{_gib(memory['weight_bytes'])} ({memory['weight_dtype']})"
    activations = f"{_gib(memory['activation_bytes'])} (steps of {memory['batched_tokens']:,} "
    activations += f"tokens, {memory['sequences']:,} sequences)"
    states, sequences = memory["state_bytes"], memory["state_sequences"]
    held = _gib(states) + (f" (of {sequences:,} sequences)" if sequences is not None else "")
    decodes = memory["kv_tokens"] is not None
    room = f"{memory['kv_tokens'] or 0:,}" if memory["fits"] else "does not fit"
    longest = f"{memory['longest_context_tokens']:,} tokens"
    return [
        ("on each GPU", f"{memory['gpu']}, tp {memory['tp']}, server: {memory['server']}"),
        ("share in use", f"{_gib(memory['usable_bytes'])} ({memory['memory_share']:g})"),
        ("weights", weights),
        ("activations", activations),
        ("buffers", f"{_gib(memory['buffer_bytes'])} (CUDA, workspaces, NCCL)"),
        ("windows and states", held if states else None),
        ("KV" if decodes else "left", _gib(memory["kv_bytes"])),
        ("KV tokens", room if decodes or not memory["fits"] else None),
        ("longest context", longest if decodes and memory["fits"] else None),
        ("memory as of", memory["memory_source"]),
    ]


def _table(rows: list[tuple[str, str | None]]) -> Screen:
    lines = [(head, text) for head, text in rows if text is not None]
    return text_table(("", " "), lines, unbroken=("",))


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:,.3f} billion"


def _states(state_bytes: int) -> str | None:
    return f"{state_bytes:,} bytes" if state_bytes else None


def _blocks(tokens: int | None) -> str | None:
    return f"{tokens:,} tokens in vLLM (--block-size)" if tokens else None


def _gib(count: float) -> str:
    return f"{count / _GIB:,.2f} GiB"
