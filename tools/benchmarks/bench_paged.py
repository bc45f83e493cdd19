"""Output tokens per CPU second: the torch engine against padded `transformers` generate, vLLM and
SGLang.

Both serve the same requests of mixed lengths (prompts of 8 to 256 tokens and answers of 4 to 256,
log-uniform) on one thread: generate in batches of as many as the concurrency, in order of arrival,
padded on the left and until the longest answer is out; the engine with the policy `vllm` and as
many places. Only tokens that were asked for count. CPU time, so that a busy machine matters less;
rounds alternate, and the best of each side counts. Servers for CPU that are installed (`backends
list`) serve the same requests with as many places, offline, without HTTP or prefix caching, on one
thread, once; CPU time of all their processes from the first request on, so that nothing of their
start counts. vLLM is there twice, compiled and eager. A server that fails leaves a dash, and its
reason on stderr. `--servers none` leaves them out. All compute in `--dtype`; in bfloat16 answers
part at near ties, because each rounds sums in other places. The last lines say which of the bounds
hold: not below generate at 1 at once; at 32 three times (tiny) and 1.5 times (100m).

    python tools/benchmarks/bench_paged.py [--models tiny,100m] [--concurrency 1,8,32] [--rounds 2]
        [--servers vllm,vllm-eager,sglang] [--batches 3] [--dtype float32|bfloat16]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from slo_bench.harness.core.state import RequestState
from slo_bench.harness.engine.torch.build_engine import Engine, KvCacheConfig
from slo_bench.harness.engine.torch.clock import RealClock
from slo_bench.harness.engine.torch.decoder import Decoder
from slo_bench.harness.engine.torch.load_decoder import load_decoder
from slo_bench.harness.engine.torch.sequence import Sequence as Tokens
from slo_bench.harness.policies.systems import system
from slo_bench.harness.servers.launch.environments import Environment, installed
from slo_bench.harness.servers.launch.random_model import make_model, model_fields
from slo_bench.harness.servers.launch.server_kind import Launch
from slo_bench.workloads.request import Slo

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "100m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 16000,
    },
}
EAGER = "-eager"
BOUNDS = {("tiny", 1): 1.0, ("100m", 1): 1.0, ("tiny", 32): 3.0, ("100m", 32): 1.5}
_LONGEST_S = 1800.0
_SINGLE = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SHORTEST_ANSWER, SHORTEST_PROMPT, LONGEST = 4, 8, 256


@dataclass(frozen=True)
class OfflineRequest:
    """A request: its prompt and how many tokens it wants."""

    prompt: list[int]
    answer: int


def requests(count: int, vocabulary: int, seed: int = 0) -> list[OfflineRequest]:
    draw = Random(seed)

    def length(low: int) -> int:
        return round(math.exp(draw.uniform(math.log(low), math.log(LONGEST))))

    return [
        OfflineRequest(
            [draw.randrange(3, vocabulary) for _ in range(length(SHORTEST_PROMPT))],
            length(SHORTEST_ANSWER),
        )
        for _ in range(count)
    ]


def by_engine(
    decoder: Decoder, prompts: Sequence[OfflineRequest], places: int
) -> tuple[float, list[Any]]:
    """CPU seconds, and the answers."""
    served_system = system("vllm").with_parameters(max_num_seqs=places)
    engine = Engine(decoder, KvCacheConfig(64 * places, 16))
    states = [
        RequestState(row, 0.0, len(request.prompt), request.answer, request.answer, Slo())
        for row, request in enumerate(prompts)
    ]
    answers: list[Any] = [None] * len(prompts)
    begin_s = time.process_time()
    instance = engine.instance(
        served_system.policy, lambda r: Tokens(list(prompts[r.id].prompt)), RealClock()
    )
    instance.ended = lambda r, tokens: answers.__setitem__(r.id, tokens.tokens[r.prompt_tokens :])
    instance.inbox.extend(states)
    instance.run(float("inf"), False)
    return time.process_time() - begin_s, answers


def by_generate(
    model: Any, prompts: Sequence[OfflineRequest], places: int
) -> tuple[float, list[Any]]:
    """CPU seconds, and the answers."""
    answers = []
    begin_s = time.process_time()
    with torch.inference_mode():
        for first in range(0, len(prompts), places):
            batch = prompts[first : first + places]
            wide = max(len(request.prompt) for request in batch)
            ids = torch.zeros(len(batch), wide, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, request in enumerate(batch):
                ids[row, wide - len(request.prompt) :] = torch.tensor(request.prompt)
                mask[row, wide - len(request.prompt) :] = 1
            token_ids = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(request.answer for request in batch),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            rows = token_ids[:, wide:].tolist()
            answers += [row[: request.answer] for row, request in zip(rows, batch, strict=True)]
    return time.process_time() - begin_s, answers


@dataclass(frozen=True)
class Server:
    """An environment, and whether vLLM in it compiles."""

    environment: Environment
    eager: bool

    @property
    def title(self) -> str:
        """Its column."""
        name = self.environment.name.removesuffix("-cpu")
        return f"{name}{EAGER}" if self.eager else name


class ServerError(Exception):
    """It gave no answers."""


def by_server(
    server: Server, path: Path, prompts: Sequence[OfflineRequest], places: int, dtype: str
) -> tuple[float, list[Any]]:
    """CPU seconds, and the answers."""
    server_environment = server.environment
    script = Path(__file__).with_name("offline_tokens.py")
    payload = {
        "prompts": [request.prompt for request in prompts],
        "answers": [request.answer for request in prompts],
    }
    launch = Launch(model=str(path), port=0)
    environ = {
        **os.environ,
        **server_environment.kind.environ(server_environment.device, launch),
    }
    environ["DTYPE"] = dtype
    environ["EAGER"] = "1" if server.eager else ""
    programs = f"{server_environment.programs}{os.pathsep}{environ.get('PATH', os.defpath)}"
    process = subprocess.Popen(
        [
            str(server_environment.python),
            str(script),
            server_environment.backend,
            str(path),
            str(places),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environ, **_SINGLE, "PATH": programs},
        start_new_session=True,
    )
    try:
        out, problem = process.communicate(json.dumps(payload), timeout=_LONGEST_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it may have left
        process.wait()
    lines = [line for line in out.splitlines() if line.startswith('{"cpu_s"')]
    if not lines:
        raise ServerError(f"{server.title} gave no answers: {problem[-2000:]}")
    reply = json.loads(lines[-1])
    return reply["cpu_s"], reply["answers"]


def servers(names: str) -> list[Server]:
    """The newest environment for CPU of each."""
    newest: dict[str, Environment] = {}
    for candidate in installed():
        if candidate.device == "cpu":
            newest.setdefault(candidate.backend, candidate)
    newest_servers = []
    for name in names.split(","):
        environment = newest.get(name.removesuffix(EAGER))
        if environment is not None:
            newest_servers.append(Server(environment, name.endswith(EAGER)))
    return newest_servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="tiny,100m")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batches", type=int, default=3, help="of padded generate, a round")
    parser.add_argument("--servers", default=f"vllm,vllm{EAGER},sglang")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    beside = servers(options.servers)
    begin_s, gains = time.monotonic(), {}
    heads = ["engine tok/s", "generate tok/s", *(server.title for server in beside)]
    print(f"{'model':>6} {'at once':>8} {'requests':>9}", *(f"{head:>18}" for head in heads))
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            path = make_model(Path(folder) / name, {**model_fields(), **MODELS[name]})
            decoder = load_decoder(path, dtype=options.dtype)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=options.dtype).eval()
            for text in options.concurrency.split(","):
                places = int(text)
                prompts = requests(options.batches * max(places, 2), decoder.config.vocab)
                sides: list[tuple[float, list[Any]] | None] = []
                sides += by_us(decoder, model, prompts, places, options.rounds)
                sides += [
                    beside_us(server, path, prompts, places, options.dtype) for server in beside
                ]
                gains[name, places] = show(name, places, prompts, sides)
    for (name, places), bound in BOUNDS.items():
        if (gain := gains.get((name, places))) is not None:
            held = "holds" if gain >= bound else "MISSED"
            print(f"{name} at {places}: {gain:.2f} times generate, {bound:g} wanted: {held}")
    print(f"{(time.monotonic() - begin_s) / 60:.0f} minutes; load {os.getloadavg()[1]:.1f}")


def beside_us(
    server: Server, path: Path, prompts: Sequence[OfflineRequest], places: int, dtype: str
) -> tuple[float, list[Any]] | None:
    """None: it gave no answers."""
    try:
        return by_server(server, path, prompts, places, dtype)
    except (ServerError, subprocess.TimeoutExpired) as problem:
        print(problem, file=sys.stderr, flush=True)
        return None


def by_us(
    decoder: Decoder, model: Any, prompts: Sequence[OfflineRequest], places: int, rounds: int
) -> list[tuple[float, list[Any]]]:
    """The engine's best round and that of generate."""
    sides = [
        (by_engine(decoder, prompts, places), by_generate(model, prompts, places))
        for _ in range(rounds)
    ]
    return [min(rounds_of, key=lambda side: side[0]) for rounds_of in zip(*sides, strict=True)]


def show(
    name: str,
    places: int,
    prompts: Sequence[OfflineRequest],
    sides: Sequence[tuple[float, list[Any]] | None],
) -> float:
    """Prints a line; how many times as much as generate the engine gives."""
    tokens = sum(request.answer for request in prompts)
    engine, generate = sides[:2]
    assert engine is not None
    assert generate is not None
    rates, same = [], []
    for side in sides:
        rates.append(f"{tokens / side[0]:>18.1f}" if side else f"{'-':>18}")
        pairs = zip(side[1], generate[1], strict=True) if side else ()
        same.append(str(sum(a == b for a, b in pairs)) if side else "-")
    gain = generate[0] / engine[0]
    print(
        f"{name:>6} {places:>8} {len(prompts):>9}",
        *rates,
        f"  {gain:.2f} times generate; answers equal to its: {', '.join(same)}",
        flush=True,
    )
    return gain


if __name__ == "__main__":
    main()
