"""One request on its way: when what happened, and the bytes that came."""

from __future__ import annotations

from array import array

from .faults import RequestFault

NOT_YET_S = float("nan")


class Exchange:
    """Times but the arrival are `time.perf_counter`'s; `pieces[i]` was there at `stamps[i]`.

    The pieces are those of the body; if it is `chunked`, with the bytes that say so.
    """

    __slots__ = (
        "arrival_s",
        "body_bytes",
        "chunked",
        "connections",
        "detail",
        "end_s",
        "endpoint",
        "fault",
        "first_byte_s",
        "pieces",
        "row",
        "sent_s",
        "stamps",
        "started_s",
        "status",
        "waited_for",
    )

    def __init__(self, row: int, endpoint: int, arrival_s: float, waited_for: bool) -> None:
        self.row = row
        self.endpoint = endpoint
        self.arrival_s = arrival_s  # scheduled, on the workload's clock
        self.started_s = NOT_YET_S  # when we turned to it: later than due, if we are late
        self.sent_s = NOT_YET_S  # written to a connection
        self.first_byte_s = NOT_YET_S
        self.end_s = NOT_YET_S
        self.status = 0
        self.fault = RequestFault.NONE
        self.detail = ""
        self.connections = 0  # that were tried
        self.waited_for = waited_for  # others arrive when this one is answered
        self.chunked = False
        self.body_bytes = 0  # that came, with what frames them
        self.stamps = array("d")
        self.pieces: list[bytes] = []
