"""`launcher report`: one masked archive of a run, for a bug report. Nothing is sent."""

from __future__ import annotations

import io
import json as json_
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

import launcher
from launcher.api.doctor import examine
from launcher.api.history import Named
from launcher.cli import options, terminal
from launcher.cli.terminal import Reporter
from launcher.errors import LauncherError, NodesFailed, RunUnknown, UsageError
from launcher.features.report.contents import LINES, ReportFile, about, doctor, last, of_record, versions
from launcher.features.report.masking import Anonymous
from launcher.features.report.names import names_of
from launcher.job.loader import parse_job
from launcher.job.models import Job
from launcher.model.facts import NodeFacts
from launcher.model.host import cluster_name
from launcher.model.sizes import counted, size_text
from launcher.naming import first_of
from launcher.node.ssh.config import chosen_config
from launcher.planning.checks import Check
from launcher.records.paths import RUNS, RunPaths
from launcher.records.store import Record, records
from launcher.run.state import RunState

_LARGEST = 1 << 20  # characters of a file
_NAMED = 6  # pseudonyms that are printed
_ASKED = 16  # nodes whose logs are read there, if the run continues


def report(
    run: options.RunOrSweep = None,
    offline: Annotated[bool, typer.Option("--offline", help="Contact no node: no checks, only what is here.")] = False,
    nodes: options.Nodes = None,
    on: options.On = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """Write launcher-report-RUN.tar.gz to the current folder: versions, the job,
    its plan, events and result, the end of each log, and doctor's checks of
    the nodes. What is packed is listed first. Nothing is sent, and of the code
    only names and sizes are packed.

    Secrets are replaced by ***, and the names of people, machines and networks
    by user-1, node-1 and so on. Other words stay: look at it before you send it.

    Of a sweep, the run that failed first is packed, else the latest one.

    Example: launcher report imagenet
    """
    if offline and (nodes or on):
        raise UsageError("--offline", "excludes --nodes and --on", "name a run that is recorded here, or omit it")
    notes, log = list[str](), Reporter().log
    with _run(run, nodes, on, ssh_config, notes) as found:
        record = Record(RunPaths(found.folder)) if found else None
        job = _job(record)
        hosts = options.hosts(nodes, on) or [*dict.fromkeys(node.host for node in (record.nodes() if record else ()))]
        seen = [] if offline else _checks(job, hosts, ssh_config, notes)
        parts = [versions(record, seen), *([doctor(seen)] if seen else ()), *(of_record(record) if record else ())]
        if found and not offline and found.outcome is None:
            parts += _now(found, notes)
    if record and record.unmasked:
        notes.append(record.unmasked)
    mask = Anonymous(names_of(record, job, hosts, seen, chosen_config(ssh_config)))
    if mask.kept:
        what = "a name that is a word of the launcher, too, is replaced only where it looks like one (login, home)"
        notes.append(f"{what}: {', '.join(mask.kept)}")
    mask.learn((part.name, part.text) for part in parts)
    packed = [*_packed({part.name: part for part in parts}, mask, notes)]
    packed = [replace(first := about(packed, notes), text=mask.text(first.text)), *packed]
    name = mask.text(f"launcher-report-{record.run if record else time.strftime('%Y%m%d-%H%M%S')}")
    for note in notes:
        log(f"warning: {note}")
    if not json:
        _show(packed)
    earlier = ", in place of an earlier one" if Path(f"{name}.tar.gz").exists() else ""
    size = _write(Path(f"{name}.tar.gz"), name, packed)
    if json:
        files = [{"name": part.name, "bytes": len(part.text.encode()), "why": part.why} for part in packed]
        terminal.say_json({"archive": f"{name}.tar.gz", "bytes": size, "files": files})
    everything = " ".join(part.text for part in packed)
    if renamed := [
        f"{old} is {new}" for old, new in mask.pseudonyms.items() if new in everything and "address" not in new
    ]:
        log(f"in the report, {first_of(renamed, _NAMED)}")
    log(f"wrote {name}.tar.gz ({size_text(size)}){earlier}; nothing was sent; look at it with: tar tzvf {name}.tar.gz")


def _run(
    run: str | None, nodes: str | None, on: str | None, ssh_config: Path | None, notes: list[str]
) -> AbstractContextManager[launcher.Run | None]:
    """Return the run; None if there is none, or its nodes do not respond: versions and checks may tell why."""
    try:
        latest = records()[-1].run if run is None and nodes is None and on is None else run
        latest = latest if run is None else _of_sweep(options.named(run, nodes, on, ssh_config))
        found = options.find(latest, nodes, on, ssh_config)
    except IndexError:
        notes.append("no run is recorded in runs/ (they are recorded where `up` is called)")
    except NodesFailed as error:
        notes.append(str(error))
    except RunUnknown as error:
        if run is not None:
            raise
        notes.append(str(error))
    else:
        if run is None and latest is not None:
            Reporter().log(f"the latest run is {found.id}")  # also one that was not started, unlike elsewhere
        return found
    return nullcontext()


def _of_sweep(named: Named) -> str | None:
    """Return the run that is meant; of a sweep, the first that failed, else the latest."""
    if named.group is None:
        return named.runs[0]
    known = [str(run) for run in named.runs]
    failed = [run for run in known if (Record(RunPaths(RUNS / run)).result() or {}).get("state") == RunState.FAILED]
    chosen = [*failed, *reversed(known)][0]
    Reporter().log(f"of the sweep {named.group}, the report is about {chosen}")
    return chosen


def _job(record: Record | None) -> Job | None:
    with suppress(OSError, UnicodeDecodeError, LauncherError):
        return parse_job(record.job_text()) if record else None
    return None


def _checks(
    job: Job | None, hosts: Sequence[str], ssh_config: Path | None, notes: list[str]
) -> list[Check | NodeFacts]:
    """Return what `launcher doctor NODE...` finds, which starts no container; on a cluster, and for plain processes,
    what `launcher doctor JOB` finds.
    """
    clusters = [name for host in hosts if (name := cluster_name(host)) is not None]
    of_job = job if job and (clusters or not job.traits.has_images) else None
    if not hosts or (clusters and not job):
        return []
    Reporter().log(f"checking {counted(len(hosts), 'machine')}; to contact none: --offline")
    cluster = clusters[0] if clusters else None
    with _noted(notes), examine(of_job, hosts, cluster=cluster, ssh_config=ssh_config) as found:
        return [*found.checks]
    return []


def _now(run: launcher.Run, notes: list[str]) -> Iterator[ReportFile]:
    """Yield the state of a run without a recorded end, and its logs, which may not have been collected."""
    with _noted(notes):
        yield ReportFile("status.json", "state of its nodes now", json_.dumps(run.status().to_dict()))
    for node in run.nodes[:_ASKED]:
        with _noted(notes):
            if text := "\n".join(run.logs(node=node, tail=LINES, follow=False)):
                yield ReportFile(f"logs/{node}.log", f"last {LINES} lines of a node, read there now", last(text))


@contextmanager
def _noted(notes: list[str]) -> Iterator[None]:
    """Note what is missing in place of ending without a report."""
    try:
        yield
    except LauncherError as error:
        notes.append(str(error))


def _packed(parts: Mapping[str, ReportFile], mask: Anonymous, notes: list[str]) -> Iterator[ReportFile]:
    for part in parts.values():
        name, text = mask.text(part.name), mask.file(part.name, part.text)
        if mask.leaks(f"{name}\n{text}"):
            notes.append(f"{part.name} is left out: a secret or a user's name in it could not be masked")
        else:
            cut = "\n(the rest is left out)\n" if len(text) > _LARGEST else ""
            # a name of a file, or JSON, may have surrogates, which cannot be encoded
            yield ReportFile(name, part.why, f"{text[:_LARGEST]}{cut}".encode(errors="replace").decode())


def _show(packed: Sequence[ReportFile]) -> None:
    table = Table("file", "size", "why", box=None, pad_edge=False, header_style="bold")
    table.columns[1].justify = "right"
    for part in packed:
        table.add_row(Text(part.name), size_text(len(part.text.encode())), part.why)
    terminal.table_console().print(table)


def _write(path: Path, folder: str, packed: Sequence[ReportFile]) -> int:
    """Write the archive, readable by its owner only. Return its size."""
    buffer, now = io.BytesIO(), int(time.time())
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for part in packed:
            data = part.text.encode()
            member = tarfile.TarInfo(f"{folder}/{part.name}")
            member.size, member.mtime, member.mode = len(data), now, 0o600
            tar.addfile(member, io.BytesIO(data))
    with tempfile.NamedTemporaryFile(dir=".", prefix=".launcher-report-", delete=False) as file:  # has mode 0600
        try:
            file.write(buffer.getvalue())
            file.close()
            Path(file.name).replace(path)
        except BaseException as error:
            Path(file.name).unlink(missing_ok=True)
            if isinstance(error, OSError):  # a write has no name
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise
    return len(buffer.getvalue())
