"""Every parser of text from a node or a program: no exception, no path outside the run's folder, bounded memory.

A few examples by default, 10,000 for each parser in the slow tests.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.cli.terminal import coloured, escaped
from launcher.elastic import generations
from launcher.hangs.report import describe
from launcher.local_files import parse_object
from launcher.logs.lines import Lines
from launcher.logs.position import Clock
from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.plan import is_run_id
from launcher.node.docker.errors import SDK_ERRORS
from launcher.node.docker.values import container_state, engine_facts, image_info
from launcher.node.facts import parse as parse_facts
from launcher.node.files import parse_scan
from launcher.planning import gpu_checks
from launcher.records.measured import top1, training_progress
from launcher.records.paths import RunPaths
from launcher.records.store import NodeOfRun, Record
from launcher.records.wanted import want
from launcher.run import status
from launcher.run.end.evidence import gather
from launcher.run.end.outcome import last_epoch
from launcher.run.watch import attempts
from tests.failures import first_failure

ROOT = Path("/somewhere/runs/r")
MEMORY = 16 << 20  # bytes, for the largest of the examples
ENDED = ContainerState("id", "c", "i", {}, Phase.EXITED, 1, False, 0, 1.0, 2.0, "")


def metrics(data: bytes) -> None:
    lines = [found for line in data.split(b"\n") if (found := parse_object(line)) is not None]
    if progress := training_progress(lines):
        assert all(progress.parts())
    for line in lines:
        assert top1(line) is None or isinstance(top1(line), float)
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        assert last_epoch(Path(file.name)).get("kind", "epoch") == "epoch"


def event_file_name(data: bytes) -> None:
    for name in (data.decode("utf-8", "surrogateescape"), f"{data.decode('latin-1')}/events.out.tfevents.1"):
        if wanted := want(name, checkpoints=True):
            assert (ROOT / wanted.local).resolve().is_relative_to(ROOT)
            assert (ROOT / wanted.local).resolve() != ROOT
            assert wanted.local.isprintable()


def error_file(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("errors/a.json", "logs/a.log", "logs/rank-0.log", "state/a.attempts"):
            Path(folder, name).parent.mkdir(exist_ok=True)
            Path(folder, name).write_bytes(data)
        node = NodeOfRun("a", "a", 0, "c", folder, range(1))
        failure = first_failure([gather(Path(folder), node, ENDED)])
    assert failure is not None
    failure.words.encode("utf-8", "surrogatepass")


def generation(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for own in ("0001-0", "0002-1"):
            (root / "generations" / own / "tensorboard").mkdir(parents=True)
            (root / "generations" / own / "metrics.jsonl").write_bytes(data)
            (root / "generations" / own / "tensorboard" / "events.out.tfevents.1").write_bytes(data)
        generations.join(root)
        assert {path.name for path in root.iterdir()} <= {"generations", "metrics.jsonl", "tensorboard", ".joining"}


def hang(data: bytes) -> None:
    found = parse_object(data) or {}
    report = {key: [found] if key in ("problems", "waiting") else found for key in HANG_KEYS}
    for each in (found, report, {**report, **found}):
        assert all(isinstance(sentence, str) for sentence in describe(each, {0: "a"}))


def plan(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        record = Record(RunPaths(Path(folder)))
        for path in (record.paths.plan, record.paths.result):
            path.write_bytes(data)
        assert all(isinstance(node.rank, int) for node in record.nodes())
        assert isinstance((record.result() or {"state": ""})["state"], str)


def terminal_text(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    assert all(ord(char) >= 32 or char in "\t\n" for char in escaped(text))
    left = coloured(text)
    assert "\x1b]" not in left
    assert "\x9b" not in left
    lines = Lines()
    assert sum(map(len, (*lines.feed(data), *lines.end()))) <= len(data)


def container_labels(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert is_run_id(labels.read(parse_object(data) or {}).run)


def inspected(data: bytes) -> None:
    for read in (container_state, image_info, engine_facts):
        with contextlib.suppress(*SDK_ERRORS):  # which the caller reports with the node's name
            read(parse_object(data) or {})


def tried(data: bytes) -> None:
    attempts.reasons(attempts.parse(data))


PARSERS: dict[str, Callable[[bytes], object]] = {
    "metrics": metrics,
    "event file's name": event_file_name,
    "error file": error_file,
    "plan": plan,
    "facts": parse_facts,
    "labels": container_labels,
    "inspect JSON": inspected,
    "listing": parse_scan,
    "clock": Clock.parse,
    "attempts": tried,
    "utilization": lambda data: status.utilization(data, ["GPU-1"]),
    "terminal": terminal_text,
    "generations": generation,
    "worlds": attempts.parse_generations,
    "hang report": hang,
    "peer access": lambda data: gpu_checks.peers("a", data.decode("utf-8", "replace")),
}
TOKENS = [
    *(
        b"start ",
        b"generation 1 0 a,b rank 0 is now on a",
        b"exit 1 ",
        b"12 1700000000.5 ",
        b"logs/",
        b"tensorboard/",
        b"../",
        b"/",
        b"a.tfevents.1",
        b"\0",
        b"\n",
    ),
    *(b"@@pci\n", b"@@processes\n", b"@@owners\n", b"@@mig\n", b"GPU 0: ", b"@exit ", b", Enabled\n", b"Process ID : "),
    *(b"@@user\n", b"@@gpus\n", b"@@addresses\n", b"0, GPU-1, x, 9", b"\xff", b"9" * 40, b"9" * 5000, b"-1", b"1e999"),
    *(
        b"\x1b[31m",
        b"\x1b]0;t",
        b"\x07",
        b"\x1b[2J",
        b"\xc2\x9b",
        b"\r",
        b"MemTotal: ",
        b"Traceback (most recent call last):\n",
    ),
    *(
        b'{"message": ',
        b'{"kind": "step", "step": ',
        b'"epoch"',
        b"NaN",
        b"[",
        b"{",
        b"}",
        b"]",
        b'"',
        b"Infinity",
        b", ",
    ),
    *(b'{"nodes": [', b'{"state": "done"}', b'"extraInfo": {"timestamp": '),
]
KEYS = ["kind", "step", "steps", "epoch", "epochs", "time", "loss", "val", "top1", "images_per_s", "data_wait", "nodes"]
KEYS += ["Id", "State", "Status", "ExitCode", "StartedAt", "Config", "Labels", "Env", "RootFS", "Layers", "Created"]
KEYS += [
    "Runtimes",
    "DiscoveredDevices",
    *(name for name in vars(labels).values() if str(name).startswith("launcher.")),
]
HANG_KEYS = ["problems", "waiting", "silent", "stands", "error"]
KEYS += [*HANG_KEYS, "missing", "other", "ranks", "collective", "number", "sizes", "group"]
KEYS += ["message", "extraInfo", "py_callstack", "timestamp", "state", "node", "rank", "container"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["step", "epoch"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=12,
)
INPUTS = st.one_of(
    st.lists(st.sampled_from(TOKENS) | st.binary(max_size=6), max_size=12).map(b"".join),
    st.lists(JSON.map(lambda value: json.dumps(value).encode()), max_size=3).map(b"\n".join),
)
NASTY = [
    *(b"[" * 100_000, b'{"a":' * 20_000, b"{" * 100_000, b'{"x": ' + b"9" * 100_000 + b"}", b"a" * 100_000),
    *(b"\x1b]" * 10_000, b"\r" * 20_000, b"\n" * 5_000, b"/" * 20_000),
]


@pytest.mark.parametrize("parse", PARSERS.values(), ids=PARSERS.keys())
@pytest.mark.parametrize("examples", [40, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_any_text_is_handled(parse: Callable[[bytes], object], examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(INPUTS)
    def check(text: bytes) -> None:
        parse(text)

    check()


@pytest.mark.parametrize("parse", PARSERS.values(), ids=PARSERS.keys())
def test_a_long_text_of_one_kind_takes_little_memory(parse: Callable[[bytes], object]) -> None:
    for text in NASTY:
        tracemalloc.start()
        try:
            parse(text)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < MEMORY, text[:20]
