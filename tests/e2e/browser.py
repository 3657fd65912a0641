"""A headless Chromium controlled by the DevTools protocol over a pipe: no port, no driver, no extra package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # needed for root, as in CI; it only opens our own pages
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1600,1300",
    "--remote-debugging-pipe",
)


def program() -> str | None:
    """The browser's path, or None if none is installed."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Page:
    """One browser tab."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, fro: int) -> None:
        self._process, self._to, self._from = process, to, fro
        self._buffer = b""
        self._id = 0
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; AssertionError if it throws."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout: float = 60) -> Any:
        """Waits until the expression is true, returns its value; AssertionError with the page's text on time-out."""
        deadline = time.monotonic() + timeout
        while not (value := self.evaluate(expression)):
            if time.monotonic() > deadline:
                text = self.evaluate("document.body.innerText")
                raise AssertionError(f"never true in {timeout} s: {expression}\nthe page says:\n{text}")
            time.sleep(0.2)
        return value

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, timeout: float = 30, **parameters: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol and returns its result."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._id:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._from, 1 << 16)
            assert piece, f"the browser ended with exit code {self._process.wait()}"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def browser(executable: str, profile: Path) -> Iterator[Page]:
    """A browser with an empty profile, ended at exit."""
    commands, to = os.pipe()
    fro, answers = os.pipe()
    # The protocol's ends are fds 3 and 4 of the browser: high copies, so that neither overwrites the other on its way.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (commands, answers)]
    os.close(commands)
    os.close(answers)
    become = "import os, sys; a = sys.argv; os.dup2(int(a[1]), 3); os.dup2(int(a[2]), 4); os.execv(a[3], a[3:])"
    argv = [sys.executable, "-c", become, *map(str, high), executable, *FLAGS, f"--user-data-dir={profile}"]
    log = profile.with_suffix(".log")
    with log.open("wb") as errors:
        process = subprocess.Popen(argv, pass_fds=high, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
    for fd in high:
        os.close(fd)
    try:
        yield Page(process, to, fro)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to)
        os.close(fro)
