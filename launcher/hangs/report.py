"""Explain a hang: which collectives the ranks wait for, by the dumps of torch's flight recorder.

The dumps are pickles, which are not loaded on this machine: flight_report.py analyses them in a short
container of the job's image on one node (for plain processes, with the job's Python) and prints JSON.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError, NodeUnfit
from launcher.image import probe
from launcher.model.container import Mount
from launcher.node.engine import Engine
from launcher.records.paths import as_shown
from launcher.records.store import NodeOfRun
from launcher.records.wanted import RECORDINGS

OTHERS_WAIT = "the others wait for"
TIME_LIMIT = 180.0  # seconds, most of them the import of torch
_ARCHIVE = ".flight_recorder.tar"  # in the output folder of the node that analyses them
_RECORDING = re.compile(r"(gloo|nccl|stack)_(\d{1,6})")
_UNMET = re.compile(  # what gloo and NCCL say if a collective timed out, or its sizes do not match
    r"gloo/\S+\] (Timed out waiting \d+ms for (recv|send)|op\.preamble\.length)"
    r"|Watchdog caught collective operation timeout: (Work|NCCL)"
)


def unmet(log: str) -> bool:
    """Return whether a log shows a collective that timed out because other ranks did not join it."""
    return _UNMET.search(log) is not None


def recordings(root: Path, since: Mapping[str, float]) -> list[Path]:
    """Return the collected dumps, the newest of each name: a rank may have run on several nodes.

    since: each node's last start, by its name.
    """
    fresh = [
        file
        for node, started in since.items()
        for file in (root / RECORDINGS / node).glob("*")
        if _RECORDING.fullmatch(file.name) and file.stat().st_mtime >= started
    ]
    oldest_first = sorted(fresh, key=lambda file: (file.stat().st_mtime, file))
    return sorted({file.name: file for file in oldest_first}.values())


def explain_recordings(
    engine: Engine, node: NodeOfRun, spec: Mapping[str, Any], files: Sequence[Path], names: Mapping[int, str]
) -> list[str]:
    """Return as sentences which collectives and ranks the ranks wait for, by their recordings `files`.

    engine, node, spec: of the node that analyses them; spec is its container's in the run's plan. names: node name by
    rank.
    """
    # after the loss of a node, ranks may have moved
    names = {**names, **{int(file.name.partition("_")[2]): file.parent.name for file in files}}
    try:
        return describe(_read(engine, node, spec, files), names)
    except LauncherError as error:
        return [f"its flight recorder dumps could not be analysed: {error}"]


def _read(engine: Engine, node: NodeOfRun, spec: Mapping[str, Any], files: Sequence[Path]) -> Mapping[str, Any]:
    """Run flight_report.py on a node; return its report. Raises LauncherError."""
    try:
        python, image, output = _python(spec["argv"]), spec["image"], spec["layout"]["output"]
        mounts = (*(Mount(**mount) for mount in spec["mounts"]), Mount(node.output, output))
        user = {"env": spec["env"], "user": spec["user"], "groups": tuple(spec["groups"])}
    except (LookupError, TypeError):  # a run found by its labels, or on a cluster
        folder = as_shown(files[0].parents[1])
        fix = f"use torchfrtrace on {folder}"
        raise NodeUnfit(node.name, "no local record of the run's plan", fix) from None
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for file in files:
            tar.add(file, f"{file.name.partition('_')[0]}/{file.name}")
    data = buffer.getvalue()
    engine.files.write(f"{node.output}/{_ARCHIVE}", [data], len(data), below=node.output)
    script = (Path(__file__).parent / "container_scripts" / "flight_report.py").read_text(encoding="utf-8")
    like = replace(probe.ANY_CONTAINER, **user, mounts=mounts)
    command = (python, "-c", script, f"{output}/{_ARCHIVE}")
    return probe.run(engine, image, "of the job", command, like, TIME_LIMIT)


def _python(argv: Sequence[str]) -> str:
    """Return the image's Python: what a container's command has before our script. Raises LookupError without one."""
    for before, arg in pairwise(argv):
        if arg.endswith(("/agent.py", "/elastic.py")):
            return before
    raise LookupError("no torchrun")


def describe(report: Mapping[str, Any], nodes: Mapping[int, str]) -> list[str]:
    """Return the report of flight_report.py as sentences. nodes: rank -> name. The report is untrusted input."""
    try:
        return [*_sentences(report, nodes)]
    except (LookupError, TypeError, ValueError, AttributeError):
        return ["its flight recorder report could not be parsed"]


def _sentences(report: Mapping[str, Any], nodes: Mapping[int, str]) -> Iterator[str]:
    for problem in report["problems"]:
        called = _called(problem)
        if missing := problem["missing"]:
            standing = [f"rank {rank} is at {at}" for rank in missing if (at := report["stands"].get(str(rank)))]
            yield "; ".join([f"{OTHERS_WAIT} {_ranks(missing, nodes)} at {called[0][1]}", *standing])
        if len(called) > 1 or not missing:
            yield ", ".join(f"{_ranks(ranks, nodes)} called {what}" for ranks, what in called)
    for last in report["waiting"]:
        yield f"{_ranks(last['ranks'], nodes)} called {_what(last)}"
    if silent := report["silent"]:
        yield f"{_ranks(silent, nodes)} left no flight recorder dump"
    if error := report["error"]:
        yield f"torch's analyser could not read the flight recorder dumps: {error}"


def _called(problem: Mapping[str, Any]) -> list[tuple[list[int], str]]:
    """Return groups of ranks by the collective that they called; the smallest first, as it is likely at fault."""
    groups: dict[str, list[int]] = {}
    for rank in problem["ranks"]:
        if rank not in problem["missing"]:
            groups.setdefault(_what(problem["other"].get(str(rank), problem)), []).append(int(rank))
    return sorted(((ranks, what) for what, ranks in groups.items()), key=lambda one: len(one[0]))


def _what(collective: Mapping[str, Any]) -> str:
    group = "" if collective["group"] in ("", "default_pg", "undefined") else f" of the group {collective['group']}"
    sizes = ", ".join(str([*map(int, size)]) for size in collective["sizes"])
    return f"{collective['collective']} number {int(collective['number'])}{group}, sizes {sizes or 'none'}"


def _ranks(ranks: Sequence[int], nodes: Mapping[int, str]) -> str:
    return ", ".join(f"rank {int(rank)} on {nodes.get(int(rank), '?')}" for rank in ranks)
