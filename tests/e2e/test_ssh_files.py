"""What a program does to its files in a container, and what a reader of its output leaves, on a node over ssh."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import launcher
from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]

PRIVATE = "/home/trainer/private.txt"  # exists on the node, not in the container


def test_links_out_of_a_container_bring_no_file_of_the_ssh_user(bed_cli: Cli, bed: Bed) -> None:
    bed.sh(bed.nodes[0], f"echo private text >{PRIVATE}", user="trainer")
    attack = f"""
        cd /output
        ln -s {PRIVATE} metrics.jsonl; ln -s /home/trainer tensorboard; mkfifo logs/rank-0.log
        rm state/node1.attempts; ln -s {PRIVATE} state/node1.attempts
        test ! -e metrics.jsonl && echo attacked; sleep 2
    """
    job = bed_cli.job("links", **bed_job(nodes=["node1"], run={"command": ["sh", "-c", attack]}))
    up = bed_cli("up", job)
    assert "attacked" in up.stdout + up.stderr
    assert "node1: metrics.jsonl is a link: ignored" in up.stderr
    files = [path for path in bed_cli.runs()[-1].rglob("*") if path.is_file()]
    assert not [path for path in files if b"private text" in path.read_bytes()]
    bed_cli("down", "--purge")
    assert bed.sh(bed.nodes[0], f"cat {PRIVATE}; rm {PRIVATE}") == "private text\n"
    assert bed.wait_clean() == []


def test_output_that_is_not_read_to_its_end_holds_no_session(
    bed_cli: Cli, bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sshd allows ten sessions a connection; each reader needs two."""

    def state() -> tuple[int, str]:
        return threading.active_count(), bed.sh(bed.nodes[0], "pgrep -c -u trainer tail || true").strip()

    monkeypatch.chdir(bed_cli.cwd)
    script = "while :; do echo line; sleep 0.01; done"
    job = launcher.load({"name": "broken-off", **bed_job(nodes=["node1"], run={"command": ["sh", "-c", script]})})
    with launcher.up(job, ssh_config=Path(bed.ssh_config), log=lambda _: None) as run:
        deadline = time.monotonic() + 60
        while not list(run.logs(follow=False, tail=1)) and time.monotonic() < deadline:
            time.sleep(0.1)
        before = state()
        for _ in range(10):
            assert next(run.logs()) == "line"
        deadline = time.monotonic() + 60
        while state() != before and time.monotonic() < deadline:
            time.sleep(0.2)
        assert state() == before
        run.down(purge=True)
