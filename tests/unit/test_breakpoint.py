"""breakpoint() in a process of a run, without a launcher: what is said, and how long it waits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher.run.watch.attempts import skipping, waiting
from tests.unit.container_box import Box

WAIT = {"PYTHONBREAKPOINT": "launcher_breakpoint.wait", "RANK": "3"}


def limit(box: Box, seconds: str) -> None:
    module = box.kit / "modules" / "launcher_breakpoint.py"
    text = module.read_text()
    assert text.count("LIMIT = 600.0") == 1
    module.write_text(text.replace("LIMIT = 600.0", f"LIMIT = {seconds}"))


def program(box: Box, text: str) -> Path:
    file = box.root / "program.py"
    file.write_text(text)
    return file


def test_nobody_comes_so_it_goes_on_and_does_not_wait_again(one: Box) -> None:
    limit(one, "0.2")
    file = program(one, "for turn in range(3):\n    breakpoint()\nprint('end')\n")
    code, out = one.run(sys.executable, str(file), env=WAIT)
    assert code == 0
    assert out.decode().splitlines() == [
        f"launcher: rank 3 on gpu-a waits in {file}:2, breakpoint(): launcher debug {one.root} (it goes on after 0 s)",
        "launcher: rank 3 on gpu-a goes on: nobody came within 0 s",
        f"launcher: rank 3 on gpu-a skips breakpoint() in {file}:2: nobody came to an earlier one within 0 s",
        "end",
    ]
    assert [line.split()[0] for line in one.attempts] == ["start", "waits", "goes", "skips", "exit"]


def test_the_name_of_a_script_is_shown_as_it_is(one: Box) -> None:
    limit(one, "0.2")
    file = one.root / "mein träning\u202e.py"
    file.write_text("breakpoint()\n")
    out = one.run(sys.executable, str(file), env=WAIT)[1].decode()
    assert f"waits in {one.root}/mein träning?.py:1, breakpoint()" in out
    (noted,) = waiting("\n".join([line for line in one.attempts if "goes" not in line] + [""]).encode())
    assert noted.place == f"{one.root}/mein träning?.py:1, breakpoint()"


def test_a_rank_that_waits_shows_that_it_does_not_hang(one: Box) -> None:
    limit(one, "3.0")
    module = one.kit / "modules" / "launcher_breakpoint.py"
    module.write_text(module.read_text().replace("BEAT = 1.0", "BEAT = 0.02"))
    one.run(sys.executable, str(program(one, "breakpoint()\n")), env={**WAIT, "LAUNCHER_HANG_TIMEOUT": "600"})
    assert (one.output / "state" / "gpu-a.alive").stat().st_size > 0


def test_it_names_after_how_long_a_collective_of_the_others_fails(one: Box) -> None:
    limit(one, "0.2")
    fake = """if True:
        import datetime, sys, types
        new = types.SimpleNamespace
        backend = new(options=new(_timeout=datetime.timedelta(seconds=77)))
        world = new(_get_backend=lambda device: backend)
        sys.modules["torch"] = new(device=str)
        sys.modules["torch.distributed.distributed_c10d"] = new(GroupMember=new(WORLD=world))
        breakpoint()
        """
    out = one.run(sys.executable, str(program(one, fake)), env=WAIT)[1]
    assert b"(it goes on after 0 s; a collective of other ranks fails after 77 s)" in out


def test_one_that_is_skipped_is_noted_for_those_who_follow_another_node(one: Box) -> None:
    file = program(one, "for turn in range(2):\n    breakpoint()\nprint('end')\n")
    out = one.run(sys.executable, str(file), env={"RANK": "3"})[1].decode()  # as PYTHONBREAKPOINT is on a cluster
    why = f"{file}:2: nobody watches a run on a cluster, of a sweep or with CI=true"
    assert out.splitlines() == [f"launcher: rank 3 on gpu-a skips breakpoint() in {why}", "end"]
    assert skipping("\n".join([*one.attempts, ""]).encode()) == ((3, why),)


@pytest.mark.parametrize("connected", [True, False])
def test_a_client_of_debugpy_is_where_it_stops(one: Box, connected: bool) -> None:
    limit(one, "0.2")
    stand_in = f"def is_client_connected(): return {connected}\ndef breakpoint(): print('debugpy stops', flush=True)\n"
    (one.root / "debugpy.py").write_text(stand_in)
    code, out = one.run(sys.executable, str(program(one, "import debugpy\nbreakpoint()\nprint('end')\n")), env=WAIT)
    assert code == 0
    assert (b"debugpy stops\n" in out) is connected
    assert (b"waits in " in out) is not connected
    assert out.endswith(b"end\n")


def test_a_kit_that_cannot_be_written_is_said_and_stops_nothing(one: Box) -> None:
    (one.kit / "home" / ".debug").write_text("in the way")
    code, out = one.run(sys.executable, str(program(one, "breakpoint()\nprint('end')\n")), env=WAIT)
    assert code == 0
    assert b"it cannot wait for `launcher debug`: " in out
    assert out.endswith(b"end\n")


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        (b"start 1\nwaits 3 77 5 train.py:87, breakpoint()\n", [3]),
        (b"start 1\nwaits 3 77 5 a.py:1\nwaits 0 76 6 a.py:1\ngoes 3 77 9\n", [0]),
        (b"start 1\nwaits 3 77 5 a.py:1\nexit 1 8\nstart 9\n", []),  # of an earlier attempt
        ("start 1\nwaits 3 77 5 trä\u202ening.py:87\n".encode(), [3]),
        ("start 1\nwaits 3 77 5 a\x9b2J.py\n".encode(), []),
        (b"start 1\nwaits 3 77 5 a\x1b[2J.py\nwaits x 1 1 a\n", []),
    ],
)
def test_who_waits_is_known_from_the_attempts(text: bytes, ranks: list[int]) -> None:
    assert [one.rank for one in waiting(text)] == ranks
