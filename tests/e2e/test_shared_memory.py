"""What a killed program leaves in /dev/shm under a name of its own: named, removed on request, and found as a cause."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.node.process.engine import ProcessEngine
from tests.e2e.cli import Cli

SHM = Path("/dev/shm")
CREATES = "from multiprocessing.shared_memory import SharedMemory; SharedMemory({name!r}, create=True, size=10)"


@pytest.fixture
def name() -> Iterator[str]:
    found = f"launcher-test-{secrets.token_hex(6)}"
    yield found
    for path in SHM.glob(f"{found}*"):
        if path.is_dir():
            for inner in path.iterdir():
                inner.unlink()
            path.rmdir()
        else:
            path.unlink()


def test_it_is_named_by_down_and_by_the_next_failure_and_removed_on_request(home_cli: Cli, name: str) -> None:
    write = f"head -c 48000000 /dev/zero >/dev/shm/{name}; echo written; exec sleep 600"
    job = {"runtime": "process", "nodes": ["local", "local"]}
    home_cli("up", "-d", home_cli.job("leaves", **job, run={"command": ["sh", "-c", write]}))
    home_cli.until_logged("written")
    down = home_cli("down").stderr
    assert down.count(f"{name} (48 MB)") == 1  # both nodes are this machine
    assert "to remove them: launcher clean --shared-memory" in down

    creates = ["python3", "-c", CREATES.format(name=name)]
    failed = home_cli("up", home_cli.job("creates", **job, run={"command": creates}), code=1)
    assert f"an earlier process left /dev/shm/{name} (48 MB) there" in failed.stderr
    assert f"rm -r /dev/shm/{name}; what runs of this folder left: launcher clean --shared-memory" in failed.stderr

    kept = home_cli("clean", "--yes")
    assert f"local: /dev/shm/{name}  48 MB" in kept.stdout
    assert "to remove them: --shared-memory" in kept.stderr
    assert (SHM / name).exists()
    home_cli("clean", "--yes", "--shared-memory")
    assert not (SHM / name).exists()
    assert name not in home_cli("clean").stdout


def test_a_failed_run_names_it_too(home_cli: Cli, name: str) -> None:
    job = {"runtime": "process", "nodes": ["local"], "run": {"command": ["sh", "-c", f": >/dev/shm/{name}; exit 3"]}}
    assert f"left in /dev/shm: {name} (0 B)" in home_cli("up", home_cli.job("fails", **job), code=1).stderr


def test_what_is_older_or_in_use_is_not_named(name: str) -> None:
    engine, now = ProcessEngine("local"), time.time()
    paths = {kind: SHM / f"{name}-{kind}" for kind in ("old", "open", "mapped", "folder", "used-folder", "[a]", "left")}
    for kind, path in paths.items():
        (path / "file" if "folder" in kind else path).parent.mkdir(exist_ok=True)
        (path / "file" if "folder" in kind else path).write_bytes(b"12345")
    os.utime(paths["old"], (now - 1000, now - 1000))
    with paths["open"].open(), (paths["used-folder"] / "file").open(), paths["[a]"].open():
        with paths["mapped"].open("r+b") as file:
            held = mmap.mmap(file.fileno(), 0)
        left = {
            each.name.removeprefix(f"{name}-"): each.size
            for each in engine.shared_memory(now - 60)
            if name in each.name
        }
    held.close()
    assert left == {"folder": 5, "left": 5}


def test_it_is_not_named_while_another_run_of_this_user_may_use_it(home_cli: Cli, name: str) -> None:
    other = home_cli.job("other", runtime="process", nodes=["local"], run={"command": ["sleep", "600"]})
    home_cli("up", "-d", other)
    write = f": >/dev/shm/{name}; exit 3"
    job = home_cli.job("leaves", runtime="process", nodes=["local"], run={"command": ["sh", "-c", write]})
    assert name not in home_cli("up", job, code=1).stderr
