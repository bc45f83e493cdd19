"""The answer of `slo-bench observe` on a terminal: what a running server carries, and what next."""

from __future__ import annotations

from collections.abc import Sequence

from ...harness.load_generator.observed import ObservedServer
from ...tuner.planning.headroom import Headroom
from ...workloads.lengths import mean_tokens
from ..figures.figure import rate_text, seconds_text
from .screen import Column, Group, Screen


def observe_screen(
    server: ObservedServer, slos: Sequence[str], headroom: Headroom | None, unseen: str | None
) -> Screen:
    """What was seen, the changes that were simulated, and the answer.

    Args:
        server: what was seen.
        slos: the SLO as text, one.
        headroom: None: nothing was simulated.
        unseen: the parameter for the batch's limit where it was neither seen nor given.
    """
    notes = server.notes if headroom is None else headroom.notes
    tested = [*_seen(server), f"SLO: {' or '.join(slos)}"]
    note_lines = [f"note: {note}" for note in notes]
    if headroom is None:
        answer = (
            f"capacity: not simulated: no request waited, so the batch's limit ({unseen}) was not "
            f"seen; give the server's: --set\xa0{unseen}=N"
        )
        return Screen(tested, notes=note_lines, answer=[answer])
    rows = [
        (
            change.what + " (batches larger than seen)" * change.unseen,
            f"{change.gain - 1:+.0%}",
            f"{change.gain_low - 1:+.0%} to {change.gain_high - 1:+.0%}",
        )
        for change in headroom.changes
    ]
    columns = (Column("change", words=True), Column("capacity"), Column("likely in reality"))
    return Screen(tested, columns, [Group(rows)], note_lines, _answer(headroom))


def _seen(server: ObservedServer) -> list[str]:
    last, (kv_mean, kv_peak) = server.last, server.kv_usage
    prompt, output = (mean_tokens(server.lengths(kind)) for kind in ("prompt", "output"))
    ttft, itl, e2e = (seconds_text(server.mean_s(metric)) for metric in ("ttft", "itl", "e2e"))
    share = server.cached_share
    cached = "an unknown share" if share is None else f"{share:.0%}"
    burst = "" if server.burstiness == 1 else f", bursty (cv {server.burstiness:.2g})"
    return [
        f"observed: {last.model} on {last.engine}, {server.span_s:.0f}\xa0s",
        f"load: {server.arrival_rps:.3g}\xa0req/s{burst} (mean {prompt:.0f} prompt, {output:.0f} "
        "output tokens)",
        f"latencies: TTFT {ttft}, between tokens {itl}, whole {e2e} in the mean",
        f"server: {server.mean('running'):.1f} running in the mean, {server.peak('running'):.0f} "
        f"at most; {server.peak('waiting'):.0f} waiting at most; KV {kv_mean:.0%}, at most "
        f"{kv_peak:.0%}; {cached} of prompt tokens from the prefix cache; "
        f"{server.total('preemptions'):.0f} preemptions",
    ]


def _answer(headroom: Headroom) -> list[str]:
    low, high = headroom.band_rps
    capacity = headroom.capacity
    carried = (
        "not found"
        if capacity.capacity_rps is None
        else f"{rate_text(capacity.capacity_rps)}\xa0req/s"
    )
    lines = [
        f"capacity: {carried} with {100 * capacity.target:g}\xa0% in SLO (simulated); likely in "
        f"reality {rate_text(low)} to {rate_text(high)}"
    ]
    if headroom.headroom is not None:
        lowest, highest = headroom.headroom_band
        lines.append(
            f"headroom: {headroom.headroom:+.0%}; likely in reality {lowest:+.0%} to {highest:+.0%}"
        )
    change = headroom.next_change
    advice = headroom.no_change_because if change is None else f"{change.what}: {change.how}"
    return [*lines, f"next: {advice}"]
