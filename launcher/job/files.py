"""What a job names on the caller's own machine: the code, the script, mounts of local nodes, secrets. All of it must
be there before anything starts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from launcher.job.checks import inside
from launcher.job.hosts import LOCAL
from launcher.job.models import Job, Secret
from launcher.job.problems import BadValueError, Mark, Problem, refusal
from launcher.job.problems import Path as KeyPath

Check = Callable[[Job, Path, Mapping[str, str]], Iterator[tuple[KeyPath, str]]]


def check_files(job: Job, cwd: Path, environ: Mapping[str, str]) -> None:
    """cwd: what relative paths count from. environ: where secrets without a file are.

    Raises JobInvalid with everything that is missing, each thing with its line.
    """
    checks: tuple[Check, ...] = (_code, _script, _mounts, _secrets)
    problems = [
        Problem(job.mark(path) or Mark(f"job {job.name}"), path, message)
        for check in checks
        for path, message in check(job, cwd, environ)
    ]
    if problems:
        raise refusal(problems)


def read_secrets(job: Job, cwd: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Their values, by variable; of a file all but the newline at its end. Raises JobInvalid as `check_files` does."""
    values: dict[str, str] = {}
    problems: list[Problem] = []
    for index, secret in enumerate(job.secrets):
        try:
            values[secret.name] = _value(secret, cwd, environ)
        except BadValueError as error:
            path: KeyPath = ("secrets", index)
            problems.append(Problem(job.mark(path) or Mark(f"job {job.name}"), path, str(error)))
    if problems:
        raise refusal(problems)
    return values


def code_folder(job: Job, cwd: Path) -> Path:
    return Path(os.path.normpath(cwd / Path(job.code).expanduser()))


def script_in_code(job: Job, cwd: Path) -> str | None:
    """`run.script` as it is called in the code folder, with forward slashes; None where it is not in there."""
    script = Path(os.path.normpath(cwd / Path(job.run.script or "").expanduser()))
    code = code_folder(job, cwd)
    return script.relative_to(code).as_posix() if inside(str(code), str(script)) else None


def _code(job: Job, cwd: Path, _environ: Mapping[str, str]) -> Iterator[tuple[KeyPath, str]]:
    folder = code_folder(job, cwd)
    if not folder.is_dir():
        what = "is a file; expected a folder" if folder.exists() else "no such folder"
        yield ("code",), f"{what}: {folder}; relative paths count from the directory you call from"
    elif not os.access(folder, os.R_OK | os.X_OK):
        yield ("code",), f"you may not read {folder}"


def _script(job: Job, cwd: Path, _environ: Mapping[str, str]) -> Iterator[tuple[KeyPath, str]]:
    if job.run.script is None:
        return
    path, code = ("run", "script"), code_folder(job, cwd)
    script = cwd / Path(job.run.script).expanduser()
    if not script.is_file():
        beside = code / job.run.script
        hint = f"; did you mean {os.path.relpath(beside, cwd)}?" if beside.is_file() else ""
        what = "is no file" if script.exists() else "no such file"
        yield path, f"{what}: {os.path.normpath(script)}; relative paths count from the directory you call from{hint}"
    elif script_in_code(job, cwd) is None:
        yield path, f"lies outside the code folder {code}, the only one that is put into the containers; see `code`"


def _mounts(job: Job, _cwd: Path, _environ: Mapping[str, str]) -> Iterator[tuple[KeyPath, str]]:
    """Only what this machine mounts: preflight looks at the other nodes."""
    if any(node.host == LOCAL for node in job.nodes):
        for mount in job.mounts:
            if not Path(mount.source).exists():
                yield ("mounts", mount.source), f"{mount.source} does not exist on this machine, which is a node"


def _secrets(job: Job, cwd: Path, environ: Mapping[str, str]) -> Iterator[tuple[KeyPath, str]]:
    for index, secret in enumerate(job.secrets):
        try:
            _value(secret, cwd, environ)
        except BadValueError as error:
            yield ("secrets", index), str(error)


def _value(secret: Secret, cwd: Path, environ: Mapping[str, str]) -> str:
    if secret.file is None:
        if not environ.get(secret.name):
            raise BadValueError(f"{secret.name} is not set in your environment; export it, or give {{NAME: file}}")
        return environ[secret.name]
    path = cwd / Path(secret.file).expanduser()
    try:
        # O_NONBLOCK: a pipe must not hold us. Looked at through the open file, so that what is checked is what is read.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise BadValueError(f"{path} is no file")
            if found.st_mode & 0o077:
                raise BadValueError(f"others may read {path}, mode {found.st_mode & 0o777:04o}; run: chmod 600 {path}")
            text = file.read(1 << 16).decode("utf-8").removesuffix("\n").removesuffix("\r")
    except FileNotFoundError:
        raise BadValueError(f"no such file: {path}") from None
    except OSError as error:
        raise BadValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadValueError(f"{path} is not text in UTF-8") from None
    if not text or "\0" in text:
        raise BadValueError(f"{path} holds no secret: it is {'not text' if text else 'empty'}")
    return text
