"""Symbolic links in the code: where they lead once the code is on a node."""

from __future__ import annotations

import os
import posixpath
import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.job.models import Job
from launcher.model.container import CODE
from launcher.records.code_files import CodeFile, with_parents
from launcher.records.left_out import LeftOut

_EVERYWHERE = ("/dev", "/proc", "/sys")
_MOST_FOLLOWED = 40  # as Linux


def check_links(job: Job, folder: Path, files: Sequence[CodeFile], left_out: LeftOut, *, visible: bool) -> list[str]:
    """Refuse links that lead somewhere here and nowhere on a node. Return the links that lead nowhere on both.

    visible: absolute paths mean on a node what they mean here. Otherwise the program sees only the code, the mounts,
    the data and the output. Raises JobInvalid with all such links.
    """
    links = {file.name: os.readlink(file.path) for file in files if file.is_link}  # noqa: PTH115 - as it is sent
    if not links:
        return []
    sent = {CODE, *(f"{CODE}/{path}" for path in with_parents(file.name for file in files))}
    outside = [job.output, *(mount.target for mount in job.mounts), *(data.at for data in job.data), *_EVERYWHERE]
    lost, broken = list[str](), list[str]()
    for name, target in links.items():
        end, absolute = _end(name, links)
        there = end is not None and (end in sent or any(_below(end, path) or _below(path, end) for path in outside))
        if there or (absolute and visible):
            continue
        if end is not None and (folder / name).exists():
            lost.append(f"the link {name} -> {target} {_why(end, absolute, name, folder, left_out)}")
        else:
            broken.append(name)
    job.refuse([(("code",), problem) for problem in lost])
    return broken


def _end(link: str, links: Mapping[str, str]) -> tuple[str | None, bool]:
    """Return the path in a container to which a link leads (None: it is a loop), and whether by an absolute link."""
    at, rest, absolute, followed = posixpath.dirname(f"{CODE}/{link}"), deque([posixpath.basename(link)]), False, 0
    while rest and followed < _MOST_FOLLOWED:
        part = rest.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            at = posixpath.dirname(at)
            continue
        at = posixpath.join(at, part)
        target = links.get(at.removeprefix(f"{CODE}/")) if _below(at, CODE) else None
        if target is not None:
            followed += 1
            absolute = absolute or target.startswith("/")
            at = "/" if target.startswith("/") else posixpath.dirname(at)
            rest.extendleft(reversed(target.split("/")))
    return (None if rest else at), absolute


def _why(end: str, absolute: bool, name: str, folder: Path, left_out: LeftOut) -> str:
    unneeded = "or list the link in .dockerignore if the program does not need it"
    for here in (folder, folder.resolve()):
        if absolute and _below(end, str(here)):
            relative = os.path.relpath(end, (here / name).parent)
            fix = shlex.join(["ln", "-sfn", relative, str(folder / name)])
            return f"is absolute, and a node has the code elsewhere; run: {fix}"
    if _below(end, CODE):
        inside = posixpath.relpath(end, CODE)
        entry = left_out.entry(inside)
        reason = f": {left_out.why[entry]}" if entry else ""
        return f"leads to {inside}, which is not sent{reason}; send it, {unneeded}"
    fix = f"mount it, as in mounts: {{{end}: {end}:ro}}" if absolute else "set `code` to a folder that contains both"
    return f"leads out of the code, and only the code is sent; {fix}, {unneeded}"


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
