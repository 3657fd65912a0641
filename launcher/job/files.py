"""Files of the caller's machine that a job names: code, script, mounts of local nodes, secrets. All of them must exist
before anything starts.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.errors import UsageError
from launcher.job.models import Job
from launcher.job.parts import Secret
from launcher.job.problems import BadValueError
from launcher.job.problems import Path as KeyPath
from launcher.job.scalars import LOCAL, LONGEST_PASSED, TOO_LONG, argv_of, passed_bytes, require_passable
from launcher.model.home import home

Found = tuple[KeyPath, str]  # a key and what is wrong with it, or with the file that it names
# Bytes. Linux gives all arguments and variables of a process 2 MiB, by the usual limit of its stack (execve(2)); the
# image's own, or the caller's, are among them.
MOST_PASSED = 3 << 19
_FROM_HERE = "relative paths count from the directory you call from"


def check_files(job: Job, cwd: Path, environ: Mapping[str, str]) -> None:
    """cwd: what relative paths count from. environ: has the secrets without a file.

    Raises JobInvalid with everything that is missing, each thing with its line.
    """
    values, wrong = _secrets(job, cwd, environ)
    job.refuse([*_missing(job, cwd), *wrong, *_too_much(job, values)])


def check_code(job: Job, cwd: Path) -> None:
    """Of check_files, what the code folder needs. Raises JobInvalid."""
    job.refuse(_no_code(job, cwd))


def read_secrets(job: Job, cwd: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Values by variable, without the newline at the end of a file. Raises JobInvalid as `check_files` does."""
    values, wrong = _secrets(job, cwd, environ)
    job.refuse(wrong)
    return values


def known_secrets(job: Job, cwd: Path, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """The values that this caller has, and the names of the others: in another shell, some may be missing."""
    values, _ = _secrets(job, cwd, environ)
    return list(values.values()), [secret.name for secret in job.secrets if secret.name not in values]


def is_here(source: str) -> bool:
    """Whether a data set's source is of this machine, not `host:/path`."""
    host, colon, _ = source.partition(":")
    return not colon or "/" in host


def code_folder(job: Job, cwd: Path) -> Path:
    """Raises JobInvalid where it begins with `~` and there is no such home folder."""
    return _place(job, ("code",), job.code, cwd)


def _place(job: Job, key: KeyPath, path: str, cwd: Path) -> Path:
    try:
        return Path(os.path.normpath(cwd / _expanded(path)))
    except BadValueError as error:
        job.refuse([(key, str(error))])
        raise


def _expanded(path: str) -> Path:
    """With the home folder for `~` and `~user`. Raises BadValueError where there is none."""
    user, slash, rest = path.partition("/")
    try:
        return Path(f"{home(os.environ)}{slash}{rest}") if user == "~" else Path(path).expanduser()
    except UsageError as error:
        raise BadValueError(f"~ cannot be expanded: {error.what}") from None
    except RuntimeError:
        raise BadValueError(f"{user} cannot be expanded: this machine has no user {user[1:]}") from None


def _no_code(job: Job, cwd: Path) -> Iterator[Found]:
    code = code_folder(job, cwd)
    if not code.is_dir():
        what = "is a file; expected a folder" if code.exists() else "no such folder"
        yield ("code",), f"{what}: {code}; {_FROM_HERE}"
    elif not os.access(code, os.R_OK | os.X_OK):
        yield ("code",), f"you may not read {code}"


def _missing(job: Job, cwd: Path) -> Iterator[Found]:
    """Of the code, the script, and this machine's mounts: preflight checks the other nodes."""
    code = code_folder(job, cwd)
    yield from _no_code(job, cwd)
    if job.run.script is not None:
        path = ("run", "script")
        script = _place(job, path, job.run.script, cwd)
        beside = code / job.run.script
        if not script.is_file():
            hint = f"; did you mean {os.path.relpath(beside, cwd)}?" if beside.is_file() else ""
            yield path, f"{'is no file' if script.exists() else 'no such file'}: {script}; {_FROM_HERE}{hint}"
        elif not script.is_relative_to(code):
            yield path, f"lies outside the code folder {code}, the only one that is put into the containers; see `code`"
    for data in job.data:
        key: KeyPath = ("data", data.name, "from")
        if is_here(data.source) and not (place := _place(job, key, data.source, cwd)).exists():
            yield key, f"no such file or folder: {place}; {_FROM_HERE}; another machine's are host:/path"
    if any(node.host == LOCAL for node in job.machines):
        for mount in job.mounts:
            if not Path(mount.source).exists():
                yield ("mounts", mount.source), f"{mount.source} does not exist on this machine, which is a node"


def _too_much(job: Job, secrets: Mapping[str, str]) -> Iterator[Found]:
    """What is given to each process, together: blamed is the key that has most of it."""
    envs = [job.env, *(job.env_of(node) for node in job.machines if node.env)]
    parts: dict[KeyPath, int] = {
        ("env",): max(sum(passed_bytes(f"{name}={value}") for name, value in env.items()) for env in envs),
        ("secrets",): sum(passed_bytes(f"{name}={value}") for name, value in secrets.items()),
        ("run",): sum(map(passed_bytes, (*(job.run.command or ()), *argv_of(job.run.args)))),
    }
    if sum(parts.values()) > MOST_PASSED:
        what = f"env, secrets and run are {sum(parts.values()):,} bytes together; expected at most {MOST_PASSED:,}, "
        yield max(parts, key=lambda key: parts[key]), what + "as Linux limits them: give the program files instead"


def _secrets(job: Job, cwd: Path, environ: Mapping[str, str]) -> tuple[dict[str, str], list[Found]]:
    """Their values by variable, and what is wrong with those that cannot be used."""
    values: dict[str, str] = {}
    wrong: list[Found] = []
    for index, secret in enumerate(job.secrets):
        try:
            values[secret.name] = _value(secret, cwd, environ)
        except BadValueError as error:
            wrong.append((("secrets", index), str(error)))
    return values, wrong


def _value(secret: Secret, cwd: Path, environ: Mapping[str, str]) -> str:
    """Raises BadValueError for what no variable can hold, too."""
    if secret.file is not None:
        value = _text_of(cwd / _expanded(secret.file))
    elif not (value := environ.get(secret.name, "")):
        raise BadValueError(f"{secret.name} is not set in your environment; export it, or give {{NAME: file}}")
    elif any("\ud800" <= character <= "\udfff" for character in value):  # so Python keeps bytes that are no text
        raise BadValueError(f"{secret.name} of your environment is not text in UTF-8")
    require_passable(f"{secret.name}={value}", secret.name)
    return value


def _text_of(path: Path) -> str:
    """What a secret's file holds, without the newline at its end. Raises BadValueError."""
    try:
        # O_NONBLOCK: opening a pipe must not block. fstat of the open file, so that the file checked is the file read.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise BadValueError(f"{path} is no file")
            if found.st_mode & 0o077:
                raise BadValueError(f"others may read {path}, mode {found.st_mode & 0o777:04o}; run: chmod 600 {path}")
            data = file.read(LONGEST_PASSED + 1)
            if len(data) > LONGEST_PASSED:
                raise BadValueError(f"{path} is too long: more bytes than {TOO_LONG}")
            text = data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except FileNotFoundError:
        raise BadValueError(f"no such file: {path}") from None
    except OSError as error:
        raise BadValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadValueError(f"{path} is not text in UTF-8") from None
    if not text or "\0" in text:
        raise BadValueError(f"{path} holds no secret: it is {'not text' if text else 'empty'}")
    return text
