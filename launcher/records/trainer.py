"""The launcher's trainer, the package `train`, which is added to the code of jobs that run it and do not have it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from launcher.job.arguments import argv_of, option_of
from launcher.job.models import Job
from launcher.job.overrides import expand_sweep, of_one_run
from launcher.job.parts import NodeEntry
from launcher.job.problems import Path as KeyPath
from launcher.job.scalars import Args
from launcher.records.code_files import CodeFile
from launcher.shipped import shipped

TRAINER = "train"
ERROR = "train: error: "  # begins the line with which the trainer refuses its options
CHECK_TIMEOUT = 60.0  # seconds; it takes a tenth of one


def needed_trainer(job: Job, folder: Path, files: Iterable[CodeFile]) -> Path | None:
    """Return the folder of the installed trainer if the job runs it and the files of its code do not contain it.

    Raises JobInvalid if it is not installed, or if the code has another file or link of that name.
    """
    if (job.run.module or "").partition(".")[0] != TRAINER:
        return None
    own = [
        file.name for file in files if file.name in (TRAINER, f"{TRAINER}.py") or file.name.startswith(f"{TRAINER}/")
    ]
    taken = TRAINER in own  # by a file or a link
    if any(name.endswith(".py") for name in own) or (taken and any((folder / TRAINER).glob("*.py"))):
        return None
    ours = installed()
    missing = f"the code folder {folder} has no module {TRAINER}, and"
    if taken:
        problem = f"{missing} {folder / TRAINER} conflicts with the launcher's trainer; rename it"
        job.refuse([(("run", "module"), problem)])
    if not (ours / "__main__.py").is_file():
        fix = "correct `code`, or install the launcher from its checkout or wheel, which have it"
        job.refuse([(("run", "module"), f"{missing} the launcher's trainer is not installed; {fix}")])
    return ours


def installed() -> Path:
    """Return the folder of the launcher's trainer; it may be missing."""
    return shipped(TRAINER)  # sys.path may have another `train`


def decoder_source(job: Job) -> str:
    """Return the source of the decoder that the trainer compiles, "" if the job does not run the trainer."""
    if (job.run.module or "").partition(".")[0] != TRAINER:
        return ""
    source = installed() / "data" / "roi.c"
    return source.read_text(encoding="utf-8") if source.is_file() else ""


def runs_ours(job: Job, folder: Path, added: Path | None) -> bool:
    """Return whether the job runs the launcher's trainer, not one of that name that its code brings.

    folder, added: as for `check_options`.
    """
    is_named = (job.run.module or "").partition(".")[0] == TRAINER
    return is_named and (added is not None or (folder / TRAINER).resolve() == installed().resolve())


def check_options(job: Job, folder: Path, added: Path | None, log: Callable[[str], None]) -> None:
    """Check the options of the launcher's trainer, of each variant of a sweep, before anything is touched.

    folder: the job's code. added: the trainer, if it is added to the code. A trainer that the code brings is not run
    here, unless it is the installed one. The options of a model that is not the trainer's own are checked at the start.
    log: called with a warning if the check itself fails; the start checks them again.
    Raises JobInvalid with the trainer's message, at the key of the option that it names.
    """
    if job.run.module != TRAINER or not runs_ours(job, folder, added):
        return
    programs = [
        (argv_of(variant.args_of(node)), tuple(_known(variant, node).items()))
        for variant in expand_sweep(of_one_run(job))  # of a pool, --into has no sweep
        for node in variant.machines
    ]
    for argv, known in dict.fromkeys(programs):
        if argv and not argv[0].startswith("-"):  # another command of the package, such as pack
            continue
        try:
            message = _refusal(argv, known)
        except NotCheckedError as error:
            log(f"warning: the trainer's options were not checked: {error}")
            return
        if message:
            job.refuse([(_key(job, message), message)])


class NotCheckedError(Exception):
    """The trainer said nothing about its options; the message says why."""


def _known(job: Job, node: NodeEntry) -> dict[str, str]:
    """Return those variables of a node's workers that the job decides, and not a machine's number of GPUs."""
    found = {"GROUP_WORLD_SIZE": str(len(job.nodes))}
    if own := _workers(job, node):
        found["LOCAL_WORLD_SIZE"] = str(own)
    if all(workers := [_workers(job, each) for each in job.nodes]):
        found["WORLD_SIZE"] = str(sum(workers))
    if job.min_nodes is not None:
        found["LAUNCHER_MIN_NODES"] = str(job.min_nodes)
    return found


def _workers(job: Job, node: NodeEntry) -> int:
    """Return the number of workers of a node, 0 if it is that of the machine's GPUs."""
    gpus = job.gpus_of(node)
    if job.processes != "auto":
        return int(job.processes)
    if isinstance(gpus, str):
        return 1 if gpus == "none" else 0
    return gpus if isinstance(gpus, int) else len(gpus)


def _refusal(argv: tuple[str, ...], known: Iterable[tuple[str, str]]) -> str:
    """Return the trainer's message about its options, "" if it accepts them. Raises NotCheckedError."""
    given = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    given |= dict(known)
    try:
        checked = subprocess.run(
            [sys.executable, "-m", TRAINER, "--check", *argv],
            cwd=installed().parent,
            env=given,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=CHECK_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotCheckedError(f"the check took longer than {CHECK_TIMEOUT:g} s") from None
    except OSError as error:
        raise NotCheckedError(f"{error.filename or sys.executable}: {error.strerror}") from error
    lines = checked.stderr.splitlines()
    message = next((line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)), "")
    if checked.returncode and not message:
        raise NotCheckedError(lines[-1] if lines else f"exit code {checked.returncode}")
    return message


def _key(job: Job, message: str) -> KeyPath:
    """Return the key of the option with which the message begins; that of all arguments if the option is missing."""
    found = re.match(r"--[\w-]+", message)
    option = found[0] if found else ""
    places: list[tuple[KeyPath, Args]] = [(("run", "args"), job.run.args)]
    places += [(("sweep", number), variant) for number, variant in enumerate(job.sweep)]
    places += [(("nodes", rank, "args"), node.args) for rank, node in enumerate(job.nodes)]
    for where, args in places:
        if isinstance(args, Mapping):
            spelled: list[tuple[str | int, str]] = [(key, option_of(key)) for key in args]
        else:
            spelled = [(index, str(word).partition("=")[0]) for index, word in enumerate(args)]
        for key, text in spelled:
            if text == option:
                return (*where, key)
    return ("run", "args")
