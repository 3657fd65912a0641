"""--log-to MODULE:FUNCTION: the user's function gets the records of metrics.jsonl, on a thread of its own.

Whatever it does, the run goes on: what it raises, or a call that takes too long, is one warning.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable

from train.own import own, said

LIMIT, LAST = 5.0, 20.0  # seconds: for a call, unless it is the first, which sets up; for all that are left at the end


class LogTo:
    """Calls the function for each record, in order."""

    def __init__(self, text: str, say: Callable[[str], None]) -> None:
        """`text`: of --log-to. `say`: prints a line."""
        self._text, self._function, self._say = text, own("log-to", text), say
        self._waiting: deque[str] = deque()  # lines of metrics.jsonl; the first one is being taken
        self._changed = threading.Condition()
        self._since = 0.0  # when the first one became the first, in seconds of time.monotonic()
        self._begun = self._ended = self._warned = False  # begun: the first has been taken
        self._failure = ""
        threading.Thread(target=self._run, name="log-to", daemon=True).start()

    def send(self, line: str) -> None:
        """Have the function called with the record of a line of metrics.jsonl; say what is wrong so far."""
        with self._changed:
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.append(line)
            self._changed.notify_all()
            late = self._begun and time.monotonic() - self._since > LIMIT
        self._warn(self._failure or (f"a call takes longer than {LIMIT:g} s" if late else ""))

    def close(self) -> None:
        """Wait until all records are taken, for LAST seconds at most."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting, LAST)
            missing = len(self._waiting)
        self._warn(self._failure or (f"at the end, {missing} records had not been taken" if missing else ""))

    def _warn(self, problem: str) -> None:
        if problem and not self._warned:
            self._warned = True
            self._say(
                f"train: warning: --log-to {self._text}: {problem}; the run goes on, and metrics.jsonl has all records"
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if not self._waiting:
                    return
                line = self._waiting[0]
            try:
                self._function(json.loads(line))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - of the user's function: said by `_warn`
                self._failure = self._failure or said(error)
            with self._changed:
                self._waiting.popleft()
                self._begun, self._since = True, time.monotonic()
                self._changed.notify_all()
