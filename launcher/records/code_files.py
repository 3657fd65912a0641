"""The code files of a folder, and what is left out: what ignore files exclude, credentials, run records, caches.

Files that git tracks are code: only .dockerignore excludes them. Private keys, files in which tools keep credentials
and virtual environments are left out unless .dockerignore has a line `!NAME` for them; so are archives of `launcher
report` that git does not track.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pathspec

from launcher.errors import JobInvalid
from launcher.records.git import GitError, git
from launcher.records.left_out import CREDENTIALS, EMPTY, ENVIRONMENT, EXCLUDED, IGNORE_FILES, NEVER, REPORT, LeftOut

# Never code: version control, run records, caches, environments.
_ALWAYS = (".git", "/runs/", "__pycache__/", ".venv/", "*.pyc", ".mypy_cache/", ".ruff_cache/", ".pytest_cache/")
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")  # in the folder of a virtual environment
_KINDS = (stat.S_IFREG, stat.S_IFLNK)

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
_REPORT = re.compile(r"(.*/)?(launcher-report-[^/]+\.tar\.gz|\.launcher-report-\w+)")  # also while it is written
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
    tracked: bool = False  # by git

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.status.st_mode)


@dataclass(frozen=True)
class _Rules:
    """The patterns of an ignore file, one a line, for paths below the folder `at` ("" or "folder/.../").

    file: as the user is told; "" for _ALWAYS. above: the path of `at` in the repository, from whose top git's own lists
    count.
    """

    at: str
    file: str
    patterns: pathspec.PathSpec[pathspec.Pattern]
    above: str = ""

    def verdict(self, name: str) -> str | None:
        """Return why the deciding pattern excludes a path, "" if it includes it, None if no pattern matches."""
        found = self.patterns.check_file(self.above + name[len(self.at) :])
        if found.include is None or found.index is None:
            return None
        if not found.include:
            return ""
        return f"{EXCLUDED}{self.file}:{found.index + 1}" if self.file else NEVER


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Raise JobInvalid if the body of the with statement cannot read part of this code folder."""
    try:
        yield
    except OSError as error:
        fix = "make it readable for you, or list it in .dockerignore"
        raise JobInvalid(f"code {error.filename or folder}", f"cannot be read: {error.strerror}", fix) from error


def code_files(
    folder: Path, left_out: LeftOut | None = None, tracked: Collection[str] | None = None
) -> Iterator[CodeFile]:
    """Yield the files of a folder before those of its subfolders, each sorted; ignored folders are skipped.

    left_out: filled with what is left out, and why. tracked: files that count as tracked by git, with their folders;
    None: those that are. Raises OSError if a folder or an ignore file cannot be read.
    """
    out = LeftOut() if left_out is None else left_out
    own: tuple[_Rules, ...] = ()
    if tracked is None:
        tracked, own = _repository(folder, "", out) if _in_repository(folder) else (set[str](), ())
    wanted, seen, sending = set[str](), list[str](), set[str]()
    every: tuple[_Rules, ...] = (_rules("", "", _ALWAYS),)  # the rules for tracked files too
    # folders, with the rules that apply there and why what git does not track there is excluded ("": it is not)
    waiting: list[tuple[str, tuple[_Rules, ...], str]] = [("", (*every, *own), "")]
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
            inner, own = _repository(folder, at, out)
            tracked = {*tracked, *inner}
            rules = (*rules, *own)
        for name in IGNORE_FILES if not at else IGNORE_FILES[:1]:
            ignore = found.get(name)
            if ignore is not None and (ignore.is_file(follow_symlinks=False) or ignore.is_symlink()):
                lines = Path(ignore.path).read_text(encoding="utf-8-sig", errors="replace").splitlines()
                rules = (*rules, _rules(at, at + name, lines))
                if name == ".dockerignore":
                    every = (*every, rules[-1])
                    wanted = {line[1:].strip().strip("/") for line in lines if line.startswith("!")}
        folders = []
        for base, entry in found.items():
            name = at + base
            asked_for = bool(wanted) and (name in wanted or base in wanted)
            if entry.is_dir(follow_symlinks=False):
                others = excluded or _why(rules, f"{name}/") or ("" if asked_for else _environment(entry.path))
                if why := _why(every, f"{name}/") if name in tracked else others:
                    out.why[f"{name}/"] = why
                else:
                    folders.append((f"{name}/", rules, others))
                continue
            why = _why(every, name) if name in tracked else excluded or _why(rules, name)
            if entry.is_symlink():  # runs/ or .venv/ on another disk
                why = why or _why(every[:1], f"{name}/") or ("" if asked_for else _environment(entry.path))
            if why := why or ("" if asked_for else CREDENTIALS * _is_credential(name) or _report(name, tracked)):
                out.why[name] = why
                continue
            with suppress(FileNotFoundError):  # removed since it was listed
                status = entry.stat(follow_symlinks=False)
                if stat.S_IFMT(status.st_mode) in _KINDS:
                    sending.add(at)
                    yield CodeFile(name, entry.path, status, asked_for, name in tracked)
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


def _report(name: str, tracked: Collection[str]) -> str:
    return REPORT if name not in tracked and _REPORT.fullmatch(name) else ""


def _in_repository(folder: Path) -> bool:
    real = folder.resolve()
    return any((parent / ".git").exists() for parent in (real, *real.parents))


def _environment(path: str) -> str:
    return ENVIRONMENT if any(os.access(f"{path}/{mark}", os.F_OK) for mark in _ENVIRONMENT_MARKS) else ""


def _repository(folder: Path, at: str, out: LeftOut) -> tuple[set[str], tuple[_Rules, ...]]:
    """Return what git tracks below `at`, as paths from the folder with their folders, and git's own ignore lists.

    Both are empty if git cannot tell, which `out` says, or if this is no repository.
    """
    here = folder / at
    if (listed := _git(here, out, "ls-files", "-z")) is None:
        return set(), ()
    tracked = with_parents(at + name for name in listed.split("\0") if name)
    above = (_git(here, out, "rev-parse", "--show-prefix") or "").removesuffix("\n")
    exclude = (_git(here, out, "rev-parse", "--git-path", "info/exclude") or "").removesuffix("\n")
    chosen = _git(here, out, "config", "--path", "-z", "--get", "core.excludesFile")
    default = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config", "git", "ignore").expanduser()
    top = Path(here, *[".."] * above.count("/"))
    lists = (default if chosen is None else top / chosen.rstrip("\0") if chosen.rstrip("\0") else None, here / exclude)
    rules = [
        _rules(at, _shown(path, folder), path.read_text(encoding="utf-8-sig", errors="replace").splitlines(), above)
        for path in lists
        if path is not None and path.exists()
    ]
    return tracked, tuple(rules)


def _shown(path: Path, folder: Path) -> str:
    """Return a path from the code folder or from the home folder, if it is in one of them."""
    full = os.path.normpath(path)
    for root, name in ((os.path.normpath(folder), ""), (str(Path("~").expanduser()), "~/")):
        if full.startswith(f"{root}/"):
            return name + full[len(root) + 1 :]
    return full


def _git(folder: Path, out: LeftOut, *arguments: str) -> str | None:
    """Return what git prints; None if this is no repository, a setting is not set, or git fails, which `out` says."""
    try:
        return git(folder, *arguments)
    except GitError as error:
        unset = arguments[0] == "config" and error.code == 1
        if not unset and "not a git repository" not in str(error):
            out.git_error = str(error)
        return None


def with_parents(names: Iterable[str]) -> set[str]:
    """Return relative paths and all folders on their way."""
    found = set[str]()
    for each in names:
        name = each
        while name and name not in found:
            found.add(name)
            name = name.rpartition("/")[0]
    return found


def _rules(at: str, file: str, lines: Iterable[str], above: str = "") -> _Rules:
    patterns = [_pattern(line) for line in lines]  # from_lines drops empty lines
    return _Rules(at, file, pathspec.PathSpec(patterns), above)


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
