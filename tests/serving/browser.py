"""Headless Chromium, driven through its own protocol over a pipe: https://chromedevtools.github.io/devtools-protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def chromium() -> str:
    """Where it is."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("needs Chromium, e.g. the Debian package chromium")


class Tab:
    """One page.

    Attributes:
        errors: messages of exceptions that nobody caught, and of what the page's policy refused.
    """

    def __init__(self, writing: int, reading: int):
        self._writing, self._reading, self._rest, self._number = writing, reading, b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        os.write(
            self._writing,
            json.dumps({"id": self._number, "method": method, "params": params} | session).encode() + b"\0",
        )
        while True:
            while b"\0" not in self._rest:
                part = os.read(self._reading, 1 << 20)
                assert part, "Chromium has ended"
                self._rest += part
            text, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(text)
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]["exceptionDetails"]))
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["source"] == "security":
                self.errors.append(message["params"]["entry"]["text"])
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript, awaited."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, script
            time.sleep(0.05)

    def open(self, url: str, width: int, height: int, scheme: str) -> None:
        """Go to a page, with a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)  # fmt: skip
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def press(self, key: str) -> None:
        """A key."""
        code = {"Enter": 13, "Tab": 9, "ArrowRight": 39, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def write(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """As PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def tab(profile: Path) -> Iterator[Tab]:
    """A page of a browser of its own."""
    program = chromium()
    to_browser, from_browser = os.pipe(), os.pipe()
    # The browser reads commands from file 3 and answers in file 4.
    options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
    command = f"exec {program} {options} --user-data-dir={profile} 3<&{to_browser[0]} 4>&{from_browser[1]}"
    running = subprocess.Popen(
        ["bash", "-c", command], pass_fds=(to_browser[0], from_browser[1]), stderr=subprocess.DEVNULL
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Tab(to_browser[1], from_browser[0])
    finally:
        running.kill()
        running.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])
