"""Watches the health of servers while a load is sent to them."""

from __future__ import annotations

import contextlib
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence

_EVERY_S = 3.0
_LIMIT_S = 5.0
_ENOUGH = 2  # looks in a row


@contextlib.contextmanager
def health_watched(urls: Sequence[str], every_s: float = _EVERY_S) -> Iterator[Callable[[], bool]]:
    """Ask for each URL now and then in the block; the function that it gets returns whether one of
    them has refused, or answered with a server error, twice in a row. A slow answer is none.
    """
    stopped, gone = threading.Event(), threading.Event()

    def watch() -> None:
        failed = dict.fromkeys(urls, 0)
        while not stopped.wait(every_s):
            for url in urls:
                failed[url] = failed[url] + 1 if _is_ill(url) else 0
                if failed[url] >= _ENOUGH:
                    gone.set()
                    return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield gone.is_set
    finally:
        stopped.set()
        thread.join()


def _is_ill(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_LIMIT_S):
            return False
    except urllib.error.HTTPError as error:
        return error.code >= 500
    except urllib.error.URLError as error:
        return isinstance(error.reason, ConnectionError)
    except ConnectionError:
        return True
    except OSError:
        return False
