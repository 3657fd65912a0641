"""Files on this machine that a job refers to: code, script, mounts of local nodes, secrets. All must exist before
anything starts.
"""

from __future__ import annotations

import json
import os
import posixpath
import pwd
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.errors import UsageError
from launcher.job.arguments import argv_of
from launcher.job.models import Job, is_commit
from launcher.job.overrides import short_commit
from launcher.job.parts import Secret
from launcher.job.problems import BadValueError
from launcher.job.problems import Path as KeyPath
from launcher.job.scalars import LOCAL, LONGEST_PASSED, SHORTEST_SECRET, TOO_LONG, passed_bytes, require_passable
from launcher.model.home import home

Found = tuple[KeyPath, str]  # a key and a problem of it, or of the file that it refers to
# Bytes. Linux limits the arguments and variables of a process to 2 MiB with the usual stack size (execve(2)), including
# the variables of the image or of the caller.
MOST_PASSED = 3 << 19
SHORTEST_PART = 8  # characters of a part of a variable that is masked, too
_FROM_HERE = "relative paths are relative to the working directory"
_STARTERS = ("python", "torchrun", "accelerate", "deepspeed")


def check_files(job: Job, cwd: Path, environ: Mapping[str, str], files: Path | None = None) -> None:
    """Check all files of a job. cwd: the base of relative paths. environ: contains the secrets without a file. files:
    where the code's files are, if not in the code folder.

    Raises JobInvalid with all problems, each with its line.
    """
    values, wrong = _secrets(job, cwd, environ)
    job.refuse([*_missing(job, cwd, files), *wrong, *_too_much(job, values)])


def check_code(job: Job, cwd: Path) -> None:
    """Check the code folder only; that of a revision when it is exported. Raises JobInvalid."""
    job.refuse([] if job.revision is not None else _no_code(job, cwd))


def read_secrets(job: Job, cwd: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets' values by variable, without a file's final newline. Raises JobInvalid like `check_files`."""
    values, wrong = _secrets(job, cwd, environ)
    job.refuse(wrong)
    return values


def known_secrets(job: Job, cwd: Path, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the texts to mask that this caller has, and the names of the others: another shell may lack some."""
    values, _ = _secrets(job, cwd, environ)
    return hidden(values, job.env), [secret.name for secret in job.secrets if secret.name not in values]


def hidden(secrets: Mapping[str, str], env: Mapping[str, str]) -> list[str]:
    """Return what is masked in everything that is printed: the values of secrets, and of FSSPEC_* the texts in them.

    fsspec reads its options from such variables, as JSON: {"headers": {"Authorization": "Bearer ..."}}.
    """
    found = [*secrets.values()]
    for name, value in (*env.items(), *secrets.items()):
        if name.startswith("FSSPEC_"):
            found += [text for text in (value, *_texts(value)) if len(text) >= SHORTEST_PART and "://" not in text]
    return found


def _texts(value: str) -> Iterator[str]:
    """Yield each text in a JSON value, and its last word: without `Bearer`."""
    waiting: list[Any] = []
    with suppress(ValueError, RecursionError):
        waiting.append(json.loads(value))
    while waiting:
        match waiting.pop():
            case dict() as inner:
                waiting += inner.values()
            case list() as inner:
                waiting += inner
            case str() as text:
                yield from (text, text.rpartition(" ")[2])


def secret_files(job: Job, cwd: Path) -> list[Path]:
    """Return the files of the job's secrets. Raises JobInvalid if one has `~` and there is no such home folder."""
    return [_path(job, ("secrets",), secret.file, cwd) for secret in job.secrets if secret.file is not None]


def is_here(source: str) -> bool:
    """Return whether a data set's source is on this machine, not `host:/path` or a URL."""
    host, colon, _ = source.partition(":")
    return not colon or "/" in host


def code_folder(job: Job, cwd: Path) -> Path:
    """Return the code folder. Raises JobInvalid if it starts with `~` and there is no such home folder."""
    return _path(job, ("code",), job.code, cwd)


def _path(job: Job, key: KeyPath, path: str, cwd: Path) -> Path:
    try:
        return Path(os.path.normpath(cwd / _expanded(path)))
    except BadValueError as error:
        job.refuse([(key, str(error))])
        raise


def _expanded(path: str) -> Path:
    """Expand `~` and `~user`. Raises BadValueError if there is no such home folder."""
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
        yield ("code",), f"you do not have permission to read {code}"
    elif found := _personal(code):
        fix = "put the program in a folder of its own, and call launcher there or set `code`"
        yield ("code",), f"{code} {found}, which is never sent to nodes; {fix}"


def _personal(code: Path) -> str:
    """Return why a folder is not code: it is, or contains, the home folder of its caller or its owner."""
    if code.samefile("/"):
        return "is the root of the file system"
    homes = [os.environ.get("HOME", "")]
    for user in {os.getuid(), code.stat().st_uid}:
        with suppress(KeyError):  # no entry for this user id
            homes.append(pwd.getpwuid(user).pw_dir)
    for found in (Path(each).resolve() for each in homes if each.startswith("/")):
        for depth, folder in enumerate((found, *found.parents)):
            if os.path.exists(folder) and code.samefile(folder):  # noqa: PTH110 - Path.exists may raise
                return "contains a home folder" if depth else "is a home folder"
    return ""


def programs(job: Job, has: Callable[[str], bool]) -> frozenset[str]:
    """Return the module, or the scripts of the command, that a code has: others may be in the image. `script` must be
    in the code. has: whether there is a file of this name.
    """
    if job.run.command is not None:
        words = [word for word in job.run.command if word.endswith((".py", ".sh"))]
        return frozenset(word for word in words if has(posixpath.normpath(word)))
    if job.run.module is None:
        return frozenset()
    path = job.run.module.replace(".", "/")
    return frozenset([job.run.module] if has(f"{path}.py") or has(f"{path}/__main__.py") else [])


def programs_in(folder: Path, job: Job) -> frozenset[str]:
    """The same of a folder."""
    return programs(job, lambda name: os.path.isfile(folder / name))  # noqa: PTH113 - is_file raises for long words


def _missing(job: Job, cwd: Path, files: Path | None) -> Iterator[Found]:
    """Yield problems of the code, the script, data sets and local mounts; preflight checks the other nodes."""
    code = code_folder(job, cwd)
    if files is None:
        files = code
        yield from _no_code(job, cwd)
    if job.run.script is not None:
        path = ("run", "script")
        script = _path(job, path, job.run.script, cwd)
        there = script if files == code else files / os.path.relpath(script, code)
        in_code = code / job.run.script
        meant = f"; did you mean {os.path.relpath(in_code, cwd)}?" if in_code.is_file() else ""
        if not there.is_file():
            hint = f" in {job.revision}" if files != code else f"; {_FROM_HERE}{meant or _command_line(job, cwd)}"
            yield path, f"{'not a regular file' if there.exists() else 'no such file'}: {script}{hint}"
        elif not script.is_relative_to(code):
            what = f"is outside the code folder {code}, which alone is copied to the nodes"
            yield path, f"{what}{meant or '; see `code`'}"
    if lacking := sorted(programs_in(code, job) - programs_in(files, job)):
        of = short_commit(job.revision) if job.revision and is_commit(job.revision) else job.revision
        program: KeyPath = ("run", "command" if job.run.module is None else "module")
        yield program, f"{of} has no {', '.join(lacking)}, which the job starts, and which {code} has"
    for word in _shell_scripts(job, files):
        fix = f"convert it: sed -i 's/\\r$//' {shlex.quote(os.path.relpath(code / word, cwd))}"
        fix = fix if files == code else f"{fix}, and commit that"
        yield ("run", "command"), f"{word} has Windows line endings (CRLF), with which shells cannot run it; {fix}"
    for data in job.data:
        key: KeyPath = ("data", data.name, "from")
        if is_here(data.source) and not (path_here := _path(job, key, data.source, cwd)).exists():
            yield key, f"no such file or folder: {path_here}; {_FROM_HERE}; for another machine: host:/path"
    if any(node.host == LOCAL for node in job.machines):
        for mount in job.mounts:
            source = _path(job, ("mounts", mount.source), mount.source, cwd)
            if not source.exists():
                yield ("mounts", mount.source), f"{source} does not exist on this machine, which is a node"


def _shell_scripts(job: Job, code: Path) -> Iterator[str]:
    """Yield the words of `run.command` that are scripts of the code whose first line a shell or the kernel misreads."""
    for index, word in enumerate(job.run.command or ()):
        file = code / word
        with suppress(OSError, ValueError):
            if file.is_file() and file.is_relative_to(code):
                with file.open("rb") as stream:
                    start = stream.read(256)
                first = start.partition(b"\n")[0]
                by_kernel = index == 0 and first.startswith(b"#!")
                if first.endswith(b"\r") and (by_kernel or word.endswith((".sh", ".bash"))):
                    yield word


def _command_line(job: Job, cwd: Path) -> str:
    """Return a hint if the script is given with what starts it, or with arguments; a path may have spaces."""
    with suppress(ValueError):  # a quote is not closed
        words = shlex.split(job.run.script or "")
        at = next((index for index, word in enumerate(words) if word.endswith(".py")), -1)
        started = (cwd / words[at]).is_file() or Path(words[0]).name.rstrip("0123456789.") in _STARTERS
        if at >= 0 and len(words) > 1 and started:
            args = f" and args: [{', '.join(words[at + 1 :])}]" if words[at + 1 :] else ""
            return f"; write script: {words[at]}{args}, which torchrun starts under the image's Python"
    return ""


def _too_much(job: Job, secrets: Mapping[str, str]) -> Iterator[Found]:
    """Yield a problem if arguments and variables of a process are too large together, for the largest of the keys."""
    envs = [job.env, *(job.env_of(node) for node in job.machines if node.env)]
    parts: dict[KeyPath, int] = {
        ("env",): max(sum(passed_bytes(f"{name}={value}") for name, value in env.items()) for env in envs),
        ("secrets",): sum(passed_bytes(f"{name}={value}") for name, value in secrets.items()),
        ("run",): max(
            sum(map(passed_bytes, (*(job.run.command or ()), *argv_of(job.args_of(node))))) for node in job.machines
        ),
    }
    if sum(parts.values()) > MOST_PASSED:
        what = f"env, secrets and run are {sum(parts.values()):,} bytes together; expected at most {MOST_PASSED:,}, "
        yield max(parts, key=lambda key: parts[key]), what + "a limit of Linux; pass files to the program instead"


def _secrets(job: Job, cwd: Path, environ: Mapping[str, str]) -> tuple[dict[str, str], list[Found]]:
    """Return the secrets' values by variable, and the problems of those that cannot be used."""
    values: dict[str, str] = {}
    wrong: list[Found] = []
    for index, secret in enumerate(job.secrets):
        try:
            values[secret.name] = _value(secret, cwd, environ)
        except BadValueError as error:
            wrong.append((("secrets", index), str(error)))
    return values, wrong


def _value(secret: Secret, cwd: Path, environ: Mapping[str, str]) -> str:
    """Return a secret's value. Raises BadValueError, also if it cannot be the value of a variable."""
    if secret.file is not None:
        value = _text_of(cwd / _expanded(secret.file))
    elif not (value := environ.get(secret.name, "")):
        known = "is set in your environment, but empty" if secret.name in environ else "is not set in your environment"
        raise BadValueError(f"{secret.name} {known}; export it, or give {{NAME: file}}")
    elif any("\ud800" <= character <= "\udfff" for character in value):  # bytes that are not UTF-8
        raise BadValueError(f"{secret.name} in your environment is not valid UTF-8")
    if len(value) < SHORTEST_SECRET:
        what = f"has fewer than {SHORTEST_SECRET} characters, and would not be masked"
        raise BadValueError(f"{secret.name} {what}; if others may see it, give it under env")
    require_passable(f"{secret.name}={value}", secret.name)
    return value


def _text_of(path: Path) -> str:
    """Return the content of a secret's file without its final newline. Raises BadValueError."""
    try:
        # O_NONBLOCK: opening a pipe must not block. fstat of the open file, so that the file checked is the file read.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise BadValueError(f"{path} is not a regular file")
            if found.st_mode & 0o077:
                what = f"{path} is readable by others (mode {found.st_mode & 0o777:04o})"
                raise BadValueError(f"{what}; run: chmod 600 {shlex.quote(str(path))}")
            data = file.read(LONGEST_PASSED + 1)
            if len(data) > LONGEST_PASSED:
                raise BadValueError(f"{path} is too long: more bytes than {TOO_LONG}")
            text = data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except FileNotFoundError:
        raise BadValueError(f"no such file: {path}") from None
    except OSError as error:
        raise BadValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadValueError(f"{path} is not valid UTF-8") from None
    if not text or "\0" in text:
        raise BadValueError(f"{path} has no secret: it is {'not text' if text else 'empty'}")
    return text
