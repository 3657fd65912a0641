"""What a webhook or a command may do: one line of a warning, and never an exception or a long wait."""

from __future__ import annotations

import time

import pytest

from launcher.job.settings import Notify
from launcher.run import notify
from launcher.run.notify import Notice, send
from tests.hook import GARBAGE, hook

NOTICE = Notice("job-20260101-000000-abcd", "done", 0, "job done")
TOKEN = "/hooks/T0KEN"

ANSWERS = {
    "garbage": GARBAGE,
    "nothing": b"",
    "a long status line": b"HTTP/1.1 200 " + b"x" * 100_000 + b"\r\n\r\n",
    "a hundred headers": b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(150)) + b"\r\n",
    "a long header": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    "no number": b"HTTP/1.1 abc OK\r\n\r\n",
    "an endless redirection": b"HTTP/1.1 302 Found\r\nLocation: /hooks/T0KEN\r\nContent-Length: 0\r\n\r\n",
    "a redirection elsewhere": b"HTTP/1.1 302 Found\r\nLocation: ftp://T0KEN/\r\nContent-Length: 0\r\n\r\n",
    "a redirection to no port": b"HTTP/1.1 302 Found\r\nLocation: http://a:T0KEN/\r\nContent-Length: 0\r\n\r\n",
    "terminal sequences": b"\x1b]0;T0KEN\x07 \x9b2J\r\n\r\n",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_that_is_not_http_is_one_line_without_the_address(answer: bytes) -> None:
    with hook(answer) as served:
        problems = send(Notify(webhook=served.address + TOKEN), NOTICE)
    assert len(problems) == 1
    assert problems[0].startswith("notify.webhook: ")
    assert "T0KEN" not in problems[0]
    assert problems[0].isprintable()


@pytest.mark.parametrize(
    "address",
    ["http://host:T0KEN/", "http://[T0KEN/", "http://" + "T0KEN" * 50 + "/", "https:///T0KEN", "http://.T0KEN/"],
)
def test_an_address_that_is_none_is_one_line_without_it(address: str) -> None:
    problems = send(Notify(webhook=address), NOTICE)
    assert len(problems) == 1
    assert "T0KEN" not in problems[0]


def test_a_webhook_that_answers_a_byte_a_second_and_a_slow_command_are_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notify, "LIMIT", 1.5)
    monkeypatch.setattr(notify, "COMMAND_LIMIT", 1.0)
    with hook(b"H", drips=True) as served:
        began = time.monotonic()
        problems = send(Notify(command=("sleep", "60"), webhook=served.address), NOTICE)
        took = time.monotonic() - began
    assert [problem.partition(":")[0] for problem in problems] == ["notify.command sleep", "notify.webhook"]
    assert all("timed out" in problem for problem in problems)
    assert took < 60  # of the command


def test_what_failed_and_what_succeeded_are_told_apart() -> None:
    with hook(b"HTTP/1.1 500 Broken\r\n\r\n") as served:
        one, both = (send(Notify(command=(name,), webhook=served.address), NOTICE) for name in ("true", "false"))
    assert one == ["notify.webhook: HTTP status 500; notify.command true succeeded"]
    assert both == ["notify.command false: exit code 1", "notify.webhook: HTTP status 500"]


@pytest.mark.parametrize("command", [("/nowhere/T",), ("a\0b",), ("/",)])
def test_a_command_that_cannot_run_is_one_line(command: tuple[str, ...]) -> None:
    assert len(send(Notify(command=command), NOTICE)) == 1
