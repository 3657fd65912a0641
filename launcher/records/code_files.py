"""The code files of a folder, and what is left out: what ignore files exclude, credentials, run records, caches.

Files that git tracks are code: only .dockerignore excludes them. Private keys and files in which tools keep credentials
are left out unless .dockerignore has a line `!NAME` for them.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pathspec

from launcher.errors import JobInvalid

# Never code: version control, run records, caches, environments.
_ALWAYS = (".git", "/runs/", "__pycache__/", ".venv/", "*.pyc", ".mypy_cache/", ".ruff_cache/", ".pytest_cache/")
_IGNORE_FILES = (".gitignore", ".dockerignore")  # .dockerignore only at the top
_KINDS = (stat.S_IFREG, stat.S_IFLNK)

# Why something is left out; runs/ID/left_out.json has these texts
_EXCLUDED = "excluded by "  # FILE:LINE
NEVER = "it is never sent"
CREDENTIALS = "it may contain credentials"
EMPTY = "nothing in it is sent"

_CREDENTIAL_FILES = (  # ends of paths, in lower case
    *("/.netrc", "/_netrc", "/.git-credentials", "/.pypirc", "/.pgpass", "/.my.cnf", "/.mylogin.cnf", "/.envrc"),
    *("/.aws/credentials", "accesskeys.csv", "/.docker/config.json", "/.dockercfg", "/.kube/config", "/.boto"),
    *("/application_default_credentials.json", "/gcloud/credentials.db", "/gcloud/access_tokens.db", "/adc.json"),
    *("/.azure/accesstokens.json", "/.azure/msal_token_cache.json", "/.azure/service_principal_entries.json"),
    *("huggingface/token", "huggingface/stored_tokens", "/kaggle.json", "/.kaggle/access_token", "/gh/hosts.yml"),
    *("/.s3cfg", "/rclone.conf", "/.passwd-s3fs", "/.databrickscfg", "/.modal.toml", "/.comet.config"),
    *("/.vault-token", "/.streamlit/secrets.toml", "/.htpasswd", "/id_rsa", "/id_dsa", "/id_ecdsa", "/id_ed25519"),
    *("/id_ecdsa_sk", "/id_ed25519_sk", ".ppk", ".p12", ".pfx"),
)
_ENV = re.compile(r"/\.env(\.(?!.*\b(example|sample|template|dist)\b)[^/]+)?$")
_ANY_KEY = re.compile(rb"^-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----", re.MULTILINE)
# a file that begins with a key, perhaps after comments; no program does
_KEY_FILE = re.compile(rb"(\xef\xbb\xbf)?(\s|#[^\n]*\n)*(-----BEGIN |Bag Attributes)")
_KEY_NAMES = (".pem", ".key", ".p8", ".pk8", ".crt", ".cer")
_TOKEN = re.compile(rb"^[^#;\n]*(_authToken|_auth|_password|npmAuthToken)\b", re.MULTILINE)
_LARGEST_KEY = 1 << 20  # bytes


@dataclass(frozen=True)
class CodeFile:
    """A regular file or a symbolic link. `name` is its path from the folder, with slashes."""

    name: str
    path: str
    status: os.stat_result  # of the file itself, not of a link's target
    wanted: bool = False  # .dockerignore has a line `!name`: it is sent even if it contains credentials

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.status.st_mode)


@dataclass
class LeftOut:
    """What is in a folder and not among its code files. A folder that is left out as a whole is one entry."""

    why: dict[str, str] = field(default_factory=dict)  # by path from the folder; a folder's ends with /
    git_error: str = ""  # why git could not list the tracked files

    def ignore_files(self) -> list[str]:
        """Return the name of the ignore file for each entry that one excludes."""
        excluded = [why[len(_EXCLUDED) :] for why in self.why.values() if why.startswith(_EXCLUDED)]
        return [line.rpartition(":")[0].rpartition("/")[2] for line in excluded]

    def entry(self, path: str) -> str:
        """Return the entry that a path is, or is in; "" if there is none."""
        while path:
            for each in (path, f"{path}/"):
                if each in self.why:
                    return each
            path = path.rpartition("/")[0]
        return ""


@dataclass(frozen=True)
class _Rules:
    """The patterns of an ignore file, one a line, for paths below the folder `at` ("" or "folder/.../")."""

    at: str
    file: str  # the ignore file's name; "" for _ALWAYS
    patterns: pathspec.PathSpec[pathspec.Pattern]

    def verdict(self, name: str) -> str | None:
        """Return why the deciding pattern excludes a path, "" if it includes it, None if no pattern matches."""
        found = self.patterns.check_file(name[len(self.at) :])
        if found.include is None or found.index is None:
            return None
        if not found.include:
            return ""
        return f"{_EXCLUDED}{self.at}{self.file}:{found.index + 1}" if self.file else NEVER


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Raise JobInvalid if the body of the with statement cannot read part of this code folder."""
    try:
        yield
    except OSError as error:
        fix = "make it readable for you, or list it in .dockerignore"
        raise JobInvalid(f"code {error.filename or folder}", f"cannot be read: {error.strerror}", fix) from error


def code_files(folder: Path, left_out: LeftOut | None = None) -> Iterator[CodeFile]:
    """Yield the files of a folder before those of its subfolders, each sorted; ignored folders are skipped.

    left_out: filled with what is left out, and why. Raises OSError if a folder or an ignore file cannot be read.
    """
    out = LeftOut() if left_out is None else left_out
    tracked = _tracked(folder, out) if _in_repository(folder) else set[str]()
    wanted, seen, sending = set[str](), list[str](), set[str]()
    every: tuple[_Rules, ...] = (_rules("", "", _ALWAYS),)  # the rules for tracked files too
    # folders, with the rules that apply there and why what git does not track there is excluded ("": it is not)
    waiting: list[tuple[str, tuple[_Rules, ...], str]] = [("", every, "")]
    while waiting:
        at, rules, excluded = waiting.pop()
        try:
            with os.scandir(folder / at) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except FileNotFoundError:
            if at:
                continue  # removed since it was listed
            raise
        seen.append(at)
        found = {entry.name: entry for entry in entries}
        if at and ".git" in found:  # a submodule, or another repository
            tracked |= {at + name for name in _tracked(folder / at, out)}
        for name in _IGNORE_FILES if not at else _IGNORE_FILES[:1]:
            ignore = found.get(name)
            if ignore is not None and (ignore.is_file(follow_symlinks=False) or ignore.is_symlink()):
                lines = Path(ignore.path).read_text(encoding="utf-8-sig", errors="replace").splitlines()
                rules = (*rules, _rules(at, name, lines))
                if name == ".dockerignore":
                    every = (*every, rules[-1])
                    wanted = {line[1:].strip().lstrip("/") for line in lines if line.startswith("!")}
        folders = []
        for base, entry in found.items():
            name = at + base
            if entry.is_dir(follow_symlinks=False):
                others = excluded or _why(rules, f"{name}/")
                if why := _why(every, f"{name}/") if name in tracked else others:
                    out.why[f"{name}/"] = why
                else:
                    folders.append((f"{name}/", rules, others))
                continue
            asked_for = bool(wanted) and (name in wanted or base in wanted)
            why = _why(every, name) if name in tracked else excluded or _why(rules, name)
            if entry.is_symlink():  # runs/ or .venv/ on another disk
                why = why or _why(every[:1], f"{name}/")
            if why := why or ("" if asked_for else CREDENTIALS * _is_credential(name)):
                out.why[name] = why
                continue
            with suppress(FileNotFoundError):  # removed since it was listed
                status = entry.stat(follow_symlinks=False)
                if stat.S_IFMT(status.st_mode) in _KINDS:
                    sending.add(at)
                    yield CodeFile(name, entry.path, status, asked_for)
        waiting += reversed(folders)
    used = with_parents(at.rstrip("/") for at in sending)
    out.why.update((at, EMPTY) for at in seen if at and at.rstrip("/") not in used)


def holds_credentials(file: CodeFile, content: bytes) -> bool:
    """Return whether a code file is a private key, a service account's key file, or an .npmrc with a token.

    Programs and documents that contain a key somewhere are not meant: without them the code would be incomplete.
    """
    if file.wanted or len(content) > _LARGEST_KEY:
        return False
    if b"PRIVATE KEY" in content:
        name = file.name.rpartition("/")[2].lower()
        if content.startswith(b"{"):
            return b'"private_key"' in content
        return bool(_ANY_KEY.search(content)) and (
            "." not in name or name.endswith(_KEY_NAMES) or _KEY_FILE.match(content) is not None
        )
    if file.name.endswith((".npmrc", ".yarnrc.yml")):
        return _TOKEN.search(content) is not None
    return content.startswith(b"PuTTY-User-Key-File-")


def _is_credential(name: str) -> bool:
    path = f"/{name.lower()}"
    return path.endswith(_CREDENTIAL_FILES) or bool(_ENV.search(path))


def _in_repository(folder: Path) -> bool:
    real = folder.resolve()
    return any((parent / ".git").exists() for parent in (real, *real.parents))


def _tracked(folder: Path, out: LeftOut) -> set[str]:
    """Return the paths from this folder that git tracks, with their folders; empty without git or a repository."""
    git = shutil.which("git")
    if git is None:
        return set()
    # not the repository of a hook that called the launcher; LC_ALL for the message below
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k.startswith("GIT_CONFIG")}
    environ |= {"LC_ALL": "C"}
    # fsmonitor: listing files should not run a program that the repository's settings name
    command = [git, "-C", str(folder), "-c", "core.fsmonitor=false", "ls-files", "-z"]
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode == 0:
        return with_parents(os.fsdecode(name) for name in done.stdout.split(b"\0") if name)
    said = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
    if "not a git repository" not in said:
        out.git_error = said or f"git ls-files exited with code {done.returncode}"
    return set()


def with_parents(names: Iterable[str]) -> set[str]:
    """Return relative paths and all folders on their way."""
    found = set[str]()
    for each in names:
        name = each
        while name and name not in found:
            found.add(name)
            name = name.rpartition("/")[0]
    return found


def _rules(at: str, file: str, lines: Iterable[str]) -> _Rules:
    return _Rules(at, file, pathspec.PathSpec([_pattern(line) for line in lines]))  # from_lines drops empty lines


def _pattern(line: str) -> pathspec.Pattern:
    """Return the pattern of a line. Invalid patterns, such as a lone `!` or `/`, match nothing, as in git."""
    pattern = pathspec.util.lookup_pattern("gitignore")
    if not line.rstrip().removeprefix("!").strip("/"):
        return pattern("")
    try:
        return pattern(line)
    except (ValueError, re.error):
        return pattern("")


def _why(rules: tuple[_Rules, ...], name: str) -> str:
    """Return why a path is excluded, "" if it is not. name: a folder's ends with /. rules: the first are _ALWAYS.

    The deepest ignore file with a matching pattern decides, as in git.
    """
    for each in reversed(rules):
        verdict = each.verdict(name)
        if verdict is not None:
            return (verdict and rules[0].verdict(name)) or verdict  # an ignore file may list what is never sent
    return ""
