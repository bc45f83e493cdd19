"""One executed cell: a workload arrives at a real engine in this process, in real time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....workloads.workload import Workload
from ...core.decisions import ReleaseReason
from ...core.records.request_records import Result
from ..cluster.cluster_arrivals import INF, Arrivals
from ..cluster.recorder import Recorder, timeline_of, totals_of
from ..loop.engine_instance import EngineInstance

Progress = Callable[[int, float], None]


def execute(
    workload: Workload,
    instance: EngineInstance,
    *,
    rejected: np.ndarray,
    progress: Progress | None = None,
) -> Result:
    """Serve `workload` with one instance in real time.

    Args:
        workload: the requests, each within the limits of the instance.
        instance: an instance without requests.
        rejected: rows that were rejected on arrival.
        progress: called now and then with (requests ended, clock in seconds).
    """
    recorder = Recorder(len(workload), workload.arrival_s)
    recorder.rejected(rejected)
    arrivals = Arrivals(workload, skip=rejected)
    while True:
        arrival_s = arrivals.next_s()
        if arrival_s <= instance.ready_s():
            if arrival_s == INF:
                break
            r = arrivals.pop()
            r.visible_s = arrival_s
            instance.inbox.append(r)
            continue
        instance.run(arrival_s, True)
        _collect(instance, recorder, arrivals)
        if progress is not None:
            progress(recorder.ended, instance.now_s)
    recorder.cancelled(arrivals.cancelled)
    kv_manager = instance.kv_manager
    assert kv_manager.free == kv_manager.total, (
        f"{kv_manager.total - kv_manager.free} KV blocks were lost"
    )
    assert kv_manager.host_free == kv_manager.host_total, "host KV blocks were lost"
    return Result(
        recorder.records,
        instance.measures.take_gaps(),
        timeline_of([instance]),
        totals_of([instance], recorder.last_finish_s()),
        (instance.view.policy_state,),
        overlong=len(rejected),
        counts=dict(instance.counters),
    )


def _collect(instance: EngineInstance, recorder: Recorder, arrivals: Arrivals) -> None:
    recorder.finished(instance.finished, 0, eventful=True)
    for r in instance.finished:
        if r.notify_on_finish:
            arrivals.ended(r.id, r.finish_s, answered=True)
    instance.finished.clear()
    for release in instance.outbox:
        if release.reason is not ReleaseReason.FINISH:
            recorder.gone(release)
            if release.request.notify_on_finish:
                arrivals.ended(release.request.id, instance.now_s, answered=False)
    instance.outbox.clear()
