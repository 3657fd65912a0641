"""Slurm of a newer Debian suite on this machine: its programs with their own C library, next to the system's.

Only Slurm's own programs use that library, not the jobs. See test_newest.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.bed.archive import debian_archive
from tests.bed.settings import BedUnavailable, Settings
from tests.bed.shell import output, run

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "patchelf")
CLIENTS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "srun", "sacct")
DAEMONS = ("slurmctld", "slurmd", "slurmstepd")


def unpacked(suite: str) -> Path:
    """Return a folder with the programs in `bin` and the plugins in `plugins`; made once. Raises BedUnavailable."""
    made = Settings.from_environment().cache / f"slurm-{suite}"
    if made.exists():
        return made
    if os.geteuid() or not shutil.which("apt-get"):
        raise BedUnavailable(f"only root on Debian can unpack the Slurm of {suite}")
    partial = made.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    _download(partial, suite)
    for package in (partial / "cache" / "archives").glob("*.deb"):
        run(["dpkg-deb", "-x", str(package), str(partial / "root")])
    shutil.rmtree(partial / "cache")
    (made / "bin").mkdir(parents=True)
    try:
        shutil.move(partial / "root", made / "root")
        _adopt(made)
    except BaseException:
        shutil.rmtree(made)
        raise
    shutil.rmtree(partial)
    return made


def _download(folder: Path, suite: str) -> None:
    """Download the packages with all dependencies, as if nothing was installed on this machine."""
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    (folder / "status").touch()
    archive = debian_archive()
    signed = f" [signed-by={archive.signed_by}]" if archive.signed_by else ""
    (folder / "sources.list").write_text(f"deb{signed} {archive.uri} {suite} main\n")
    paths = {"Etc::sourcelist": "sources.list", "State::lists": "lists", "State::status": "status", "Cache": "cache"}
    options = [f"Dir::{key}={folder}/{name}" for key, name in paths.items()]
    options += ["Dir::Etc::sourceparts=/dev/null", "APT::Sandbox::User=root"]
    apt = ["apt-get", *(argument for option in options for argument in ("-o", option))]
    run([*apt, "update", "-q"])
    run([*apt, "install", "-qy", "--download-only", "--no-install-recommends", *PACKAGES], timeout=600)


def _adopt(made: Path) -> None:
    """Make the programs and their plugins use the loader and the libraries of the suite."""
    root = made / "root"
    [loader] = root.glob("usr/lib/*/ld-linux-*.so.*")
    libraries = loader.parent
    plugins = libraries / "slurm-wlm"
    (made / "plugins").symlink_to(plugins)
    patchelf = [str(loader), "--library-path", str(libraries), str(root / "usr/bin/patchelf")]
    for name, found in _programs(root):
        target = made / "bin" / name
        shutil.copy(found, target)
        paths = f"{plugins}:{libraries}"
        run([*patchelf, "--set-interpreter", str(loader), "--force-rpath", "--set-rpath", paths, str(target)])


def _programs(root: Path) -> Sequence[tuple[str, Path]]:
    return [
        *((name, root / "usr/bin" / name) for name in CLIENTS),
        *((name, root / "usr/sbin" / f"{name}-wlm") for name in DAEMONS),
    ]


def version(made: Path) -> str:
    """Return the version, such as `slurm-wlm 26.05.5`."""
    return output([str(made / "bin" / "slurmd"), "-V"])
