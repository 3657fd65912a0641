"""What the ranks of a run that hung wait for: their flight recordings, read in the job's image and put into a sentence.

The recordings are pickles. They are not opened here but by container_scripts/flight_report.py, in a short container of
the job's image on one of its nodes (for plain processes, by the Python that wrote them); it answers in JSON.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher import container_scripts
from launcher.errors import LauncherError, NodeUnfit
from launcher.image import probe
from launcher.model.container import Mount
from launcher.records.paths import RunPaths
from launcher.records.wanted import RECORDINGS
from launcher.run.diagnose import OTHERS_WAIT, Failure
from launcher.run.evidence import Evidence
from launcher.run.locate import Attached
from launcher.run.state import HANG_CODE

TIME_LIMIT = 180.0  # seconds, most of them the import of torch
_ARCHIVE = ".flight_recorder.tar"  # in the output folder of the node that reads them
_RECORDING = re.compile(r"(gloo|nccl|stack)_(\d{1,6})")
_UNMET = re.compile(  # a collective's time limit, or sizes that do not fit
    r"Timed out waiting \d+ms for (recv|send)|Watchdog caught collective operation timeout|preamble\.length"
)


def explain(failure: Failure, attached: Attached, evidence: Sequence[Evidence]) -> Failure:
    """The failure with the collective at which the ranks wait and for whom, where its ranks have recorded that."""
    if failure.exit_code != HANG_CODE and not unmet(evidence):
        return failure
    files = _recordings(attached.record.paths, evidence)
    if not files:
        return failure
    nodes = {rank: one.node.name for one in evidence for rank in one.node.ranks}
    # after the loss of a node, ranks are elsewhere
    nodes |= {int(file.name.partition("_")[2]): file.parent.name for file in files}
    try:
        found = tell(_read(attached, evidence[0], files), nodes)
    except LauncherError as error:
        found = [f"what its ranks recorded could not be read: {error}"]
    what = failure.what
    if any(sentence.startswith(OTHERS_WAIT) for sentence in found):  # that says more than the stacks do
        what = what.partition(f"; {OTHERS_WAIT}")[0]
    return replace(failure, what="; ".join([what, *found]))


def unmet(evidence: Sequence[Evidence]) -> bool:
    """Whether a rank failed at a collective to which others did not come, as the logs say."""
    return any(_UNMET.search(text) for one in evidence for text in (one.log, *one.rank_logs.values()))


def _recordings(paths: RunPaths, evidence: Sequence[Evidence]) -> list[Path]:
    """Those of each node's last attempt, as they were collected; of each rank the newest."""
    found = [
        (file.stat().st_mtime, file)
        for one in evidence
        for file in (paths.root / RECORDINGS / one.node.name).glob("*")
        if _RECORDING.fullmatch(file.name) and file.stat().st_mtime >= one.last.started
    ]
    return sorted({file.name: file for _, file in sorted(found)}.values())


def _read(attached: Attached, reader: Evidence, files: Sequence[Path]) -> Mapping[str, Any]:
    """What flight_report.py answers. Raises LauncherError."""
    node, engine = reader.node, attached.engines[reader.node.name]
    spec = attached.record.container(node.rank)
    argv, layout = spec.get("argv", []), spec.get("layout", {})
    ours = next((place for place, word in enumerate(argv) if word.endswith(("/agent.py", "/elastic.py"))), 0)
    if not ours:  # a run found by its labels, or on a cluster
        paths = attached.record.paths
        raise NodeUnfit(node.name, "the run's plan is not here", f"torchfrtrace reads them: {paths.root / RECORDINGS}")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for file in files:
            tar.add(file, f"{file.name.partition('_')[0]}/{file.name}")
    data = buffer.getvalue()
    engine.files.write(f"{node.output}/{_ARCHIVE}", [data], len(data))
    script = container_scripts.text("flight_report.py").decode()
    mounts = (*(Mount(**mount) for mount in spec["mounts"]), Mount(node.output, layout["output"]))
    like = replace(probe.ANY_CONTAINER, env=spec["env"], user=spec["user"], groups=tuple(spec["groups"]), mounts=mounts)
    command = (argv[ours - 1], "-c", script, f"{layout['output']}/{_ARCHIVE}")  # the image's Python
    return probe.run(engine, spec["image"], "of the job", command, like, TIME_LIMIT)


def tell(report: Mapping[str, Any], nodes: Mapping[int, str]) -> list[str]:
    """What flight_report.py found, in words. nodes: rank -> name. The report comes from a node: it may be anything."""
    try:
        return [*_sentences(report, nodes)]
    except (LookupError, TypeError, ValueError, AttributeError):
        return ["what its ranks recorded could not be understood"]


def _sentences(report: Mapping[str, Any], nodes: Mapping[int, str]) -> Iterator[str]:
    for problem in report["problems"]:
        came = _came(problem)
        if missing := problem["missing"]:
            standing = [f"rank {rank} is at {at}" for rank in missing if (at := report["stands"].get(str(rank)))]
            yield "; ".join([f"{OTHERS_WAIT} {_ranks(missing, nodes)} at {came[0][1]}", *standing])
        if len(came) > 1 or not missing:
            yield ", ".join(f"{_ranks(ranks, nodes)} came to {what}" for ranks, what in came)
    for last in report["waiting"]:
        yield f"{_ranks(last['ranks'], nodes)} came to {_what(last)}"
    if silent := report["silent"]:
        yield f"{_ranks(silent, nodes)} left no recording"
    if error := report["error"]:
        yield f"torch's analyser could not read what the ranks recorded: {error}"


def _came(problem: Mapping[str, Any]) -> list[tuple[list[int], str]]:
    """Which ranks came to what; the fewest first, as they are to blame."""
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
