"""The joined curve of an elastic run: every step once, from the newest generation that trained it."""

from __future__ import annotations

import json
import os
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.elastic.generations import join
from launcher.records.store import NodeOfRun, Record
from launcher.records.wanted import want
from launcher.run.watch.attempts import collected, newest, segments

EPOCH = 5  # steps


@dataclass(frozen=True)
class Generation:
    """A generation that trained the steps after `begin` up to `last`. copies: number of collected points per copy."""

    begin: int
    validated: bool  # if `begin` ends an epoch: resumed after its validation
    last: int
    copies: tuple[int, ...]

    @property
    def points(self) -> list[tuple[int, bool]]:
        """Return (step, whether it belongs to a validation) in the order of writing."""
        found = [] if self.validated or self.begin == 0 or self.begin % EPOCH else [(self.begin, True)]
        for step in range(self.begin + 1, self.last + 1):
            found += [(step, False)] + [(step, True)] * (step % EPOCH == 0)
        return found


@st.composite
def runs(draw: st.DrawFn) -> list[Generation]:
    """Return generations that start at a step of an older one; all copies but one may be incomplete."""
    found: list[Generation] = []
    reached = 0
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, reached))
        last = draw(st.integers(begin, begin + 12))
        validated = draw(st.booleans())
        size = len(Generation(begin, validated, last, ()).points)
        copies = [draw(st.integers(0, size)) for _ in range(draw(st.integers(0, 2)))]
        whole = draw(st.integers(0, len(copies)))
        found.append(Generation(begin, validated, last, (*copies[:whole], size, *copies[whole:])))
        reached = max(reached, last)
    return found


def curve(run: Sequence[Generation]) -> list[tuple[int, bool, int]]:
    """Return the expected points: (step, validation, generation)."""
    found: list[tuple[int, bool, int]] = []
    for number, generation in enumerate(run, 1):
        begin = (generation.begin, generation.validated)
        found = [point for point in found if point[:2] <= begin]
        found += [(*point, number) for point in generation.points]
    return found


def event(step: int, tag: str, payload: int) -> bytes:
    """Return a record of a TensorBoard file, without checksums."""
    varint = bytes([step & 0x7F | 0x80, step >> 7]) if step > 127 else bytes([step])
    body = b"\x09" + struct.pack("<d", float(payload)) + (b"\x10" + varint if step else b"")
    body += b"\x2a" if tag else b"\x3a"  # a summary, or the start of the session
    body += bytes([len(tag) + 4, 0x0A, len(tag) + 2, 0x0A, len(tag)]) + tag.encode()
    return struct.pack("<Q", len(body)) + bytes(4) + body + bytes(4)


def write(root: Path, number: int, generation: Generation) -> None:
    start = {"kind": "start", "step": generation.begin, "validated": generation.validated, "generation": number}
    for rank, count in enumerate(generation.copies):
        folder = root / "generations" / f"{number:04}-{rank}"
        (folder / "tensorboard").mkdir(parents=True)
        lines = [json.dumps(start)]
        events = [event(generation.begin + 1, "", 0)]
        for step, validation in generation.points[:count]:
            kind = "epoch" if validation else "step"
            lines.append(json.dumps({"kind": kind, "step": step, "generation": number}))
            name = "Loss/val" if validation else "Loss/train"
            events += [event(step, name, number)] + [event(step, "LR", number)] * (not validation)
        torn = event(generation.begin + count, "Loss/train", number)[:-3]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "st')
        (folder / "tensorboard" / "events.out.tfevents.1.host.2.0").write_bytes(b"".join(events) + torn)


def points(root: Path) -> list[tuple[int, bool, int]]:
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [line["generation"] for line in lines] == sorted(line["generation"] for line in lines)
    return [(line["step"], line["kind"] == "epoch", line["generation"]) for line in lines if line["kind"] != "start"]


def drawn(root: Path) -> list[tuple[int, str, int]]:
    """Return (step, curve, generation) in the order in which TensorBoard reads the files: by name."""
    found = []
    for file in sorted((root / "tensorboard").iterdir()):
        data = file.read_bytes()
        while data:
            size = struct.unpack("<Q", data[:8])[0]
            if len(data) < size + 16:
                break  # the last record of a growing file
            body, data = data[12 : 12 + size], data[16 + size :]
            generation, name = int(struct.unpack("<d", body[1:9])[0]), body.partition(b"\x2a")[2][5:].decode()
            step = 0 if body[9:10] != b"\x10" else body[10] if body[10] < 128 else (body[10] & 0x7F) + body[11] * 128
            found += [(step, name, generation)] * bool(name)
    return found


@settings(deadline=None)  # writes files, and the machine may be busy
@given(runs(), st.data())
def test_every_step_is_there_once_and_of_the_newest_generation(run: list[Generation], data: Any) -> None:
    """For any order of collecting and joining the files."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number in data.draw(st.permutations(range(1, len(run) + 1))):
            write(root, number, run[number - 1])
            join(root)
            os.utime(root / "metrics.jsonl", (1, 1))  # changes within a tick of the clock must be detected too
        join(root)
        wanted = curve(run)
        assert points(root) == wanted
        newest = len(run)
        known = [point for point in wanted if point[2] < newest]
        seen = [point for point in drawn(root) if point[2] < newest]
        expected = [
            (step, name, g) for step, late, g in known for name in (["Loss/val"] if late else ["Loss/train", "LR"])
        ]
        assert seen == expected


def test_a_growing_file_of_tensorboard_grows_in_place(tmp_path: Path) -> None:
    write(tmp_path, 1, Generation(0, True, 4, (4,)))
    join(tmp_path)
    (file,) = (tmp_path / "tensorboard").iterdir()
    node, size = file.stat().st_ino, file.stat().st_size
    source = next(tmp_path.glob("generations/*/tensorboard/*"))
    source.write_bytes(source.read_bytes()[: -len(event(4, "Loss/train", 1)) + 3] + event(5, "Loss/train", 1))
    join(tmp_path)
    assert (file.stat().st_ino, file.stat().st_size) == (node, size + len(event(5, "Loss/train", 1)))
    write(tmp_path, 2, Generation(2, True, 3, (1,)))
    join(tmp_path)
    assert file.stat().st_ino == node
    assert [point for point in drawn(tmp_path) if point[1] == "Loss/train"] == [
        *((step, "Loss/train", 1) for step in (1, 2)),
        (3, "Loss/train", 2),
    ]


def test_a_program_need_not_say_where_it_starts(tmp_path: Path) -> None:
    for number, steps in ((1, range(1, 9)), (2, range(6, 8))):
        folder = tmp_path / "generations" / f"{number:04}-0"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "of": {number}}}\n' for step in steps))
    join(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["of"]) for line in lines] == [*((n, 1) for n in range(1, 6)), (6, 2), (7, 2)]


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("generations/0003-1/metrics.jsonl", True),
        ("generations/0003-1/rank-5.log", True),
        ("generations/0003-1/tensorboard/events.out.tfevents.1.host.2.0", True),
        ("generations/0003-1/other.bin", False),
        ("generations/3/metrics.jsonl", False),
        ("generations/0003-1/tensorboard/metrics.jsonl", True),
    ],
)
def test_which_files_of_a_generation_are_collected(path: str, local: bool) -> None:
    found = want(path)
    assert (found is not None and found.local == path) == local


def test_rank_0s_output_goes_from_log_to_log(tmp_path: Path) -> None:
    """Rank 0 is on a, then on b, then on a again; c takes part, and its offsets do not matter."""
    run = "job-20260101-000000-aaaa"
    nodes = [NodeOfRun(n, n, r, n, f"/home/u/.launcher/{run}", range(r, r + 1)) for r, n in enumerate("abc")]
    record = Record.rebuild(run, "docker", nodes, tmp_path, min_nodes=2)
    first, second, third = "rank 0 is now on a, world 3 of 3", "rank 0 is now on b, world 2 of 3", "rank 0 is now on a"
    lines = {
        "a": f"start 1\ngeneration 1 20 a,b,c {first}\nexit 1 9\nstart 9\ngeneration 3 90 a,b,c {third}\n",
        "b": f"generation 1 5 a,b,c {first}\ngeneration 2 50 b,c {second}\ngeneration 3 80 a,b,c {third}\n",
        "c": f"generation 2 7 b,c {second}\ngeneration x 7 b,c {second}\ngeneration 4 7 c \x1b[31mrank 0\n",
    }
    (record.paths.root / "state").mkdir()
    for name, text in lines.items():
        (record.paths.root / "state" / f"{name}.attempts").write_text(text)
    assert [(part.node.name, part.start, part.stop) for part in segments(record)] == [
        ("a", 0, 90),
        ("b", 50, 80),
        ("a", 90, None),
    ]
    world = newest(collected(record.paths.root, nodes))
    assert world is not None
    assert (world.number, world.members, world.text) == (3, ("a", "b", "c"), third)
