"""A headless Chromium, if installed, which tests control through its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """A page of a browser. Messages on the pipe end with a zero byte."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        """Opens an empty page."""
        self._to, self._from = to_browser, from_browser
        self._session = ""
        self._count = 0
        self._unread = b""
        self.complaints: list[str] = []  # errors that the page or the browser logged
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Calls the browser and returns its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def open(self, url: str, width: int, height: int, *, dark: bool = False) -> None:
        """Loads an address in a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def picture(self) -> bytes:
        """The window as a PNG image."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _read(self) -> Any:
        while b"\0" not in self._unread:
            part = os.read(self._from, 1 << 16)
            assert part, "the browser has ended"
            self._unread += part
        message, self._unread = self._unread.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: Any) -> None:
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(event["params"]["exceptionDetails"]))
        if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            entry = event["params"]["entry"]
            self.complaints.append(f"{entry['text']} {entry.get('url', '')}")


@contextmanager
def opened(profile: Path) -> Iterator[Page]:
    """Starts a browser and yields a page. The browser ends with the block."""
    assert PROGRAM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    inner = (to_browser[0], from_browser[1])
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
    ]
    # The browser reads from descriptor 3 and writes to 4.
    process = subprocess.Popen(
        [
            "bash",
            "-c",
            f'exec "$@" 3<&{inner[0]} 4>&{inner[1]}',
            "bash",
            PROGRAM,
            *flags,
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
        ],
        pass_fds=inner,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for fd in inner:
        os.close(fd)
    try:
        page = Page(to_browser[1], from_browser[0])
        yield page
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(to_browser[1])
        os.close(from_browser[0])
