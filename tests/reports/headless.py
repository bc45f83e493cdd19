"""Headless Chromium over the DevTools pipe: nothing but the standard library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """The path of a Chromium, or None."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    return None


class Browser:
    """One Chromium process; commands go out on its descriptor 3 and come back on 4."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        near_read, self._out = os.pipe()
        self._in, near_write = os.pipe()
        # Moved above 9 first, so that placing one at 3 cannot close the other.
        to_read = fcntl.fcntl(near_read, fcntl.F_DUPFD, 10)
        to_write = fcntl.fcntl(near_write, fcntl.F_DUPFD, 10)
        script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                script,
                "-",
                program,
                *SWITCHES,
                f"--user-data-dir={self._profile.name}",
            ],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (near_read, near_write, to_read, to_write):
            os.close(end)
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """A command's result; events that arrive meanwhile are kept in `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(60)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _next(self, patience_s: float) -> dict[str, Any]:
        until = time.monotonic() + patience_s
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError("Chromium does not answer")
            self._rest += part
        line, self._rest = self._rest.split(b"\0", 1)
        return json.loads(line)

    def open(
        self, url: str, *, width: int, dark: bool = False, height: int = 900, before: str = ""
    ) -> Page:
        """A new page at `url`, loaded and laid out; the script `before` runs ahead of its own."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        page.prefer(dark=dark)
        if before:
            page.send("Page.addScriptToEvaluateOnNewDocument", source=before)
        page.send("Page.navigate", url=url)
        page.settle()
        return page

    def close(self) -> None:
        """End the process that was started here."""
        os.close(self._out)
        self._process.terminate()
        self._process.wait(20)
        os.close(self._in)
        self._profile.cleanup()


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command to this tab."""
        return self._browser.send(method, self._session, **params)

    def resize(self, width: int, height: int = 900) -> None:
        """Set the viewport, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)

    def prefer(self, *, dark: bool) -> None:
        """Set the colour scheme that the reader prefers."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def settle(self) -> None:
        """Wait until the page is loaded and has drawn twice."""
        self.run(
            "new Promise(done => { const go = () => requestAnimationFrame(() => "
            "requestAnimationFrame(done)); "
            "document.readyState === 'complete' ? go() : addEventListener('load', go) })"
        )

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script[:80]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Move the pointer to a place in the viewport."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def key(self, name: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name)

    def screenshot(self, path: Path, selector: str | None = None) -> Path:
        """A picture of the whole page, or of one element."""
        clip: dict[str, float] = self.run(
            "(() => { const r = (%s).getBoundingClientRect(); return {x: r.left + scrollX, "
            "y: r.top + scrollY, width: r.width, height: r.height, scale: 1}; })()"
            % (f"document.querySelector({json.dumps(selector)})" if selector else "document.body")
        )
        data = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def picture(self, path: Path) -> Path:
        """A picture of what is in sight."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))
        return path

    def _events(self, method: str) -> list[dict[str, Any]]:
        self.run("1")
        return [
            event["params"]
            for event in self._browser.events
            if event.get("method") == method and event.get("sessionId") == self._session
        ]

    def requests(self) -> list[str]:
        """Addresses asked for over the network, the page itself and data: left out."""
        urls = [e["request"]["url"] for e in self._events("Network.requestWillBeSent")]
        return [url for url in urls if not url.startswith(("file:", "data:", "about:", "blob:"))]

    def complaints(self) -> list[str]:
        """Console errors and warnings, uncaught exceptions, and what the browser logged."""
        messages = [
            str(e["args"])
            for e in self._events("Runtime.consoleAPICalled")
            if e["type"] in ("error", "warning", "assert")
        ]
        messages += [str(e["exceptionDetails"]) for e in self._events("Runtime.exceptionThrown")]
        return messages + [str(e["entry"]) for e in self._events("Log.entryAdded")]

    def close(self) -> None:
        """Close the tab."""
        self._browser.send("Target.closeTarget", targetId=self._target)
