"""What a webhook or a command may do: one line of a warning, and never an exception or a long wait."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

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
    "a redirection elsewhere": b"HTTP/1.1 302 Found\r\nLocation: ftp://x/T0KEN\r\nContent-Length: 0\r\n\r\n",
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
    assert problems[0].partition("\n  -> ")[0].isprintable()


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirection_is_not_followed_and_its_host_is_named(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/mine")
    with hook(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as target:
        there = f"Location: {target.address}/T0KEN\r\nContent-Length: 0\r\n\r\n"
        with hook(f"HTTP/1.1 {code} Moved\r\n{there}".encode()) as served:
            problems = send(Notify(webhook=served.address), NOTICE)
        assert not target.asked.is_set()
    what = f"notify.webhook: HTTP status {code}: it redirects to http://127.0.0.1, which is not followed"
    assert problems == [f"{what}\n  -> in /mine/launcher/settings.yaml, set notify.webhook to where it redirects"]


def test_a_server_that_gives_no_answer_is_not_said_to_give_a_bad_one() -> None:
    with hook(b"") as served:
        problems = send(Notify(webhook=served.address), NOTICE)
    assert problems == ["notify.webhook: the server closed the connection without an answer"]


def test_a_host_without_a_server_has_the_key_and_the_file() -> None:
    with socket.socket() as bound:  # and listens not
        bound.bind(("127.0.0.1", 0))
        (problem,) = send(Notify(webhook=f"http://127.0.0.1:{bound.getsockname()[1]}"), NOTICE)
    assert "Connection refused\n  -> in " in problem
    assert problem.endswith("settings.yaml, check the host and port of notify.webhook")


def test_a_command_counts_as_soon_as_it_exits_whatever_it_leaves_in_the_background(tmp_path: Path) -> None:
    ends = {code: tmp_path / f"end{code}" for code in "03"}
    for end in ends.values():
        os.mkfifo(end)
    began = time.monotonic()
    commands = [("sh", "-c", f"cat {end} & echo broken >&2; exit {code}") for code, end in ends.items()]
    good, bad = (send(Notify(command=command), NOTICE) for command in commands)
    took = time.monotonic() - began
    for end in ends.values():
        with end.open("w"):  # its reader ends
            pass
    assert took < notify.LIMIT
    assert good == []
    assert bad == ["notify.command sh: exit code 3: broken"]


def test_a_command_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "n.sh").write_text('#!/bin/sh\ntouch "$1"\n')
    (tmp_path / "n.sh").chmod(0o700)
    assert send(Notify(command=("~/n.sh", "~/told")), NOTICE) == []
    assert (tmp_path / "told").exists()


def test_a_webhook_that_answers_a_byte_a_second_and_a_slow_command_are_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notify, "LIMIT", 1.0)
    with hook(b"H", drips=True) as served:
        began = time.monotonic()
        problems = send(Notify(command=("sleep", "60"), webhook=served.address), NOTICE)
        took = time.monotonic() - began
    assert [problem.partition(":")[0] for problem in problems] == ["notify.command sleep", "notify.webhook"]
    assert all("timed out after 1 s" in problem for problem in problems)
    assert took < 60  # of the command


def test_a_webhook_that_does_not_answer_is_told_as_one_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "LIMIT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        told = send(Notify(webhook=f"http://127.0.0.1:{silent.getsockname()[1]}"), NOTICE)
    assert told == ["notify.webhook: timed out after 0.2 s"]


def test_what_failed_and_what_succeeded_are_told_apart() -> None:
    with hook(b"HTTP/1.1 500 Broken\r\n\r\n") as served:
        one, both = (send(Notify(command=(name,), webhook=served.address), NOTICE) for name in ("true", "false"))
    assert one == ["notify.webhook: HTTP status 500; notify.command true succeeded"]
    assert both == ["notify.command false: exit code 1", "notify.webhook: HTTP status 500"]


@pytest.mark.parametrize("command", [("/nowhere/T",), ("a\0b",), ("/",)])
def test_a_command_that_cannot_run_is_one_line(command: tuple[str, ...]) -> None:
    assert len(send(Notify(command=command), NOTICE)) == 1
