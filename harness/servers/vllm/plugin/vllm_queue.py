"""The waiting queue that vLLM's scheduler is given: the policy's order, and a gate."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from ....core.decisions import NextQueue

# (key, order of arrival, request id, request)
_Entry = tuple[Any, int, str, Request]


class PolicyQueue(RequestQueue):
    """Two groups in the policy's order: requests that need prefill, and swapped requests.

    Between steps it is an ordinary queue. While vLLM fills a batch (`opened`), it shows only the
    group that may enter, and only while its head fits: vLLM stops at an empty queue.
    """

    def __init__(
        self,
        key: Callable[[Request], tuple[Any, int]],
        is_swapped: Callable[[Request], bool],
        *,
        hangs_on_view: bool = False,
    ) -> None:
        self._key = key
        self._hangs_on_view = hangs_on_view  # a request that enters may change all keys
        self._entered = False
        self._is_swapped = is_swapped
        self.waiting: list[_Entry] = []
        self.swapped: list[_Entry] = []
        self._group: list[_Entry] | None = None
        self._fits: Callable[[Request], bool] | None = None
        self._enters: Callable[[Request], None] | None = None

    def opened(
        self, which: NextQueue, fits: Callable[[Request], bool], enters: Callable[[Request], None]
    ) -> None:
        """Until `closed`, show only this group, and only while its head fits; `enters` is called
        with each request that is taken.
        """
        groups = {NextQueue.WAITING: self.waiting, NextQueue.SWAPPED: self.swapped}
        self._group = groups.get(which, [])
        self._fits, self._enters = fits, enters
        self._entered = False

    def closed(self) -> None:
        """Show all requests again, of both groups."""
        self._group = self._fits = self._enters = None

    def rekey(self) -> None:
        """Compute the keys of all waiting requests again and sort by them."""
        for group in (self.waiting, self.swapped):
            entries = [(*self._key(e[3]), e[2], e[3]) for e in group]
            group[:] = sorted(entries, key=_order)

    def head(self) -> Request | None:
        """First request of those that need prefill."""
        return self.waiting[0][3] if self.waiting else None

    def heads(self) -> list[str]:
        """Ids of the first request of each group."""
        return [group[0][2] for group in (self.waiting, self.swapped) if group]

    def add_request(self, request: Request) -> None:
        group = self.swapped if self._is_swapped(request) else self.waiting
        key, seq = self._key(request)
        insort(group, (key, seq, request.request_id, request), key=_order)

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in list(requests):
            self.add_request(request)

    def _shown(self) -> list[_Entry]:
        if self._group is not None:
            return self._group
        return self.swapped or self.waiting

    def peek_request(self) -> Request:
        shown = self._shown()
        if not shown:
            raise IndexError("peek from an empty queue")
        return shown[0][3]

    def pop_request(self) -> Request:
        shown = self._shown()
        if not shown:
            raise IndexError("pop from an empty queue")
        request = shown.pop(0)[3]
        self._entered = self._hangs_on_view
        if self._enters is not None:
            self._enters(request)
        return request

    def remove_request(self, request: Request) -> None:
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = {request.request_id for request in requests}
        for group in (self.waiting, self.swapped):
            group[:] = [entry for entry in group if entry[2] not in gone]

    def __bool__(self) -> bool:
        if self._entered and self._group is not None:
            self._entered = False
            self.rekey()
        shown = self._shown()
        return bool(shown) and (self._fits is None or self._fits(shown[0][3]))

    def __len__(self) -> int:
        return len(self.waiting) + len(self.swapped)

    def __iter__(self) -> Iterator[Request]:
        return iter([entry[3] for entry in (*self.swapped, *self.waiting)])


def _order(entry: _Entry) -> tuple[Any, int]:
    return entry[0], entry[1]
