"""The texts of a report before they are masked: of this machine, of a run's record, of its nodes. Each has a limit."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.errors import LauncherError
from launcher.image import lock
from launcher.local_files import open_regular
from launcher.model.facts import NodeFacts
from launcher.model.plan import plain
from launcher.planning.checks import Check
from launcher.records.store import Record, read_json
from launcher.records.wanted import want

LINES = 200  # of a log
_MOST = 1 << 18  # bytes that are read of a log or of the job
_LOGS = 50
_NODES = 100  # of a plan or result
_LISTED = 2000  # names of files
_PACKAGES = ("docker", "fsspec", "numpy", "paramiko", "pydantic", "PyYAML", "rich", "torch", "torchvision", "typer")
_ABOUT = """Written by `launcher report`, which has sent it nowhere.

Secrets, tokens and the names of ssh keys are replaced by ***, and names of people, machines, domains and addresses by
user-1, node-1 (by rank), host-1, domain-1, node-1-address, address-1; a name by the same word everywhere.
Common names such as root and local, and public registries, stay.

"""
_WHY = {
    "logs": f"last {LINES} lines of a node or rank",
    "errors": "the exception of a worker",
    "metrics.jsonl": f"last {LINES} lines of what the trainer measured",
    "generations": f"last {LINES} lines, of a job with min_nodes",
}


@dataclass(frozen=True)
class ReportFile:
    """A file of the report. why: one line."""

    name: str
    why: str
    text: str


def about(parts: Sequence[ReportFile], notes: Sequence[str]) -> ReportFile:
    text = "".join(f"{part.name}: {part.why}\n" for part in parts) + "".join(f"\nNote: {note}\n" for note in notes)
    return ReportFile("about.txt", "this list, and what was replaced", _ABOUT + text)


def versions(record: Record | None, seen: Sequence[Check | NodeFacts]) -> ReportFile:
    found: dict[str, Any] = {"launcher": __version__, "python": sys.version, "os": platform.platform(), "ssh": _ssh()}
    with suppress(OSError, KeyError):
        found["os"] = f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {found['os']}"
    found["packages"] = packages = dict[str, str]()
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    if record is not None and (image := (read_json(record.paths.plan) or {}).get("image")):
        found["image"] = {"name": image} | _locked(record)
    found["nodes"] = nodes = dict[str, dict[str, Any]]()
    for each in seen:
        if isinstance(each, NodeFacts):
            own = plain(each.nvidia)
            gpus = [f"{gpu.name}, {gpu.memory_mib} MiB" for gpu in each.gpus]
            nodes.setdefault(each.name, {}).update({key: own[key] for key in ("driver", "cuda", "toolkit")}, gpus=gpus)
        elif each.name == "engine":
            nodes.setdefault(each.node, {})["engine"] = each.what
    return ReportFile("versions.json", "launcher, Python, system, image, drivers", json.dumps(found))


def doctor(seen: Sequence[Check | NodeFacts]) -> ReportFile:
    text = ""
    for each in seen:
        if isinstance(each, Check):
            text += f"{each.level.value:4} {each.node:12} {each.name:18} {each.what}\n"
            text += f"{'':18}-> {each.fix}\n" if each.fix else ""
    return ReportFile("doctor.txt", "checks of the nodes, made now", text)


def of_record(record: Record) -> Iterator[ReportFile]:
    """Yield what helps in the record of a run: job, plan, events, result, names of files, ends of logs."""
    paths = record.paths
    if text := _text(paths.job, end=False):
        yield ReportFile("job.yaml", "the job, as it was started", text)
    for path, why in (
        (paths.plan, "containers, variables, commands"),
        (paths.result, "how the run ended"),
        (paths.left_out, "names of files that were not sent as code"),
    ):
        if found := read_json(path):
            if isinstance(nodes := found.get("nodes"), list) and len(nodes) > _NODES:
                found |= {"nodes": nodes[:_NODES], "left out of the report": f"{len(nodes) - _NODES} nodes"}
            yield ReportFile(path.name, why, json.dumps(found))
    if text := _text(paths.events):
        yield ReportFile("events.jsonl", "what the launcher saw", text)
    files = [*islice(_files(paths.root), _LISTED)]
    yield ReportFile("files.txt", "names and sizes of code and record", _listed(record, files))
    if state := [f"{name}\n{_text(paths.root / name)}" for name, _ in files if name.startswith("state/")]:
        yield ReportFile("state.txt", "starts and ends of the nodes", "\n".join(state))
    yield from _logs(record, [name for name, _ in files])


def last(text: str) -> str:
    """Return the last lines; a progress bar ends its lines with a carriage return."""
    return "\n".join(re.split("[\r\n]+", text.rstrip())[-LINES:]) + "\n"


def _logs(record: Record, names: Sequence[str]) -> Iterator[ReportFile]:
    """Yield the texts that were collected, those of the node and the rank that failed first."""
    failure = (record.result() or {}).get("failure") or {}
    failed = (str(failure.get("node")), f"rank-{failure.get('rank')}")
    chosen = [name for name in names if (wanted := want(name)) and wanted.text and name.partition("/")[0] in _WHY]
    chosen.sort(key=lambda name: (Path(name).stem not in failed, not name.startswith("logs/"), name))
    for name in islice((name for name in chosen if not name.endswith(".clock")), _LOGS):
        if text := _text(record.paths.root / name):
            yield ReportFile(name, _WHY[name.partition("/")[0]], last(text))


def _text(path: Path, *, end: bool = True) -> str:
    """Return the end of a file, from the beginning of a line, or its beginning; "" if it cannot be read."""
    with suppress(OSError), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _MOST) if end else 0)
        text = file.read(_MOST).decode(errors="replace")
        return re.split("[\r\n]", text, maxsplit=1)[-1] if end and size > _MOST else text
    return ""


def _files(root: Path) -> Iterator[tuple[str, int]]:
    for path in sorted(root.rglob("*")):
        if not path.is_symlink() and path.is_file():
            yield path.relative_to(root).as_posix(), path.stat().st_size


def _listed(record: Record, files: Sequence[tuple[str, int]]) -> str:
    code = record.sent_code
    lines = ["record:", *(f"{size:12,} {name}" for name, size in files)]
    lines.append("code: its archive is missing or damaged" if code is None else f"code: {len(code):,} files were sent")
    lines += [f"{file.size:12,} {name}" for name, file in islice((code or {}).items(), _LISTED)]
    return "\n".join([*lines, *(["..."] if len(code or ()) > _LISTED else [])]) + "\n"


def _locked(record: Record) -> dict[str, str]:
    """Return what the lock file of the job now says of its image."""
    named = next((str(line.get("file")) for line in record.events("job")), "")
    with suppress(LauncherError):
        found = lock.read(lock.lock_path(record.paths.root.parent.parent / named)) if named else None
        return (
            {} if found is None else {key: plain(found)[key] for key in ("base", "torch", "torchvision", "step", "why")}
        )
    return {}


def _ssh() -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(["ssh", "-V"], capture_output=True, text=True, timeout=10, check=False).stderr.strip()
    return "not installed"
