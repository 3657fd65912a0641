"""This machine: packages, the Docker engine, its compose and buildx plugins."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.bed.archive import debian_archive
from tests.bed.settings import BASE_SUITE, BedUnavailable, Settings
from tests.bed.shell import locked_file, output, run, succeeds

# Debian 12 has neither plugin; the newer suites' binaries need only libc6 >= 2.34. forky: engine 28
NEWER_SUITE = os.environ.get("LAUNCHER_BED_NEWER_SUITE", "trixie")
PLUGINS = {"compose": "docker-compose", "buildx": "docker-buildx"}
PLUGIN_FOLDER = Path("/usr/local/lib/docker/cli-plugins")
PACKAGES = {
    "dockerd": "docker.io",
    "debootstrap": "debootstrap",
    "iptables": "iptables",
    "ssh-keygen": "openssh-client",
    "busybox": "busybox",  # for the tests of container scripts
}


def engine_answers() -> bool:
    """Whether `docker` reaches an engine right now."""
    return succeeds(["docker", "version", "--format", "{{.Server.Version}}"], timeout=20)


def ensure(settings: Settings) -> None:
    """Makes sure that the engine runs and tools and plugins exist; as root, installs and starts missing ones.

    Raises BedUnavailable with one line that names what is missing.
    """
    if sys.platform != "linux":
        raise BedUnavailable(f"the bed needs Linux; this is {sys.platform}")
    if not engine_answers():
        if os.geteuid() != 0:
            raise BedUnavailable(
                "no Docker engine answers, and only root may start one (`python -m tests.bed up` as root does)"
            )
        install_packages()
        start_engine(settings)
    elif os.geteuid() == 0:
        install_packages()
    if os.geteuid() == 0:
        install_plugins()


def require_engine() -> None:
    """For callers that must not change the machine: raises BedUnavailable unless an engine already answers."""
    if not shutil.which("docker"):
        raise BedUnavailable(
            "no Docker on this machine (root on Debian: `python -m tests.bed up` installs it and brings the bed up)"
        )
    if not engine_answers():
        raise BedUnavailable(
            "no Docker engine answers (root on Debian: `python -m tests.bed up` starts one and brings the bed up)"
        )


def install_packages() -> None:
    """Installs missing PACKAGES with apt-get; a running engine from another package counts as docker.io."""
    have_engine = engine_answers()
    search = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [
        package
        for program, package in PACKAGES.items()
        if not shutil.which(program, path=search) and not (program == "dockerd" and have_engine)
    ]
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise BedUnavailable(f"missing {', '.join(missing)}, and there is no apt-get to install them with")
    lock = ["-o", "DPkg::Lock::Timeout=300"]
    environment = ["env", "DEBIAN_FRONTEND=noninteractive"]
    with apt_lock():
        run(["apt-get", *lock, "update", "-q"], check=False, timeout=300)  # a broken third-party source must not matter
        run([*environment, "apt-get", *lock, "install", "-qy", "--no-install-recommends", *missing], timeout=600)


def apt_lock() -> contextlib.AbstractContextManager[None]:
    """Return a lock that the workers of a test run share: apt-get does not wait for its lists."""
    return locked_file(Settings.from_environment().cache / "apt.lock")


def install_plugins() -> None:
    """Installs `docker compose` and `docker buildx`, unpacked from NEWER_SUITE, unless they are installed."""
    missing = [package for plugin, package in PLUGINS.items() if not succeeds(["docker", plugin, "version"])]
    if not missing or not shutil.which("apt-get"):
        return
    with unpacked(missing, NEWER_SUITE) as folder:
        PLUGIN_FOLDER.mkdir(parents=True, exist_ok=True)
        for binary in folder.glob("usr/lib*/docker/cli-plugins/docker-*"):
            shutil.copy(binary, PLUGIN_FOLDER / binary.name)
    for plugin in PLUGINS:
        run(["docker", plugin, "version"])


def newer_engine(settings: Settings, suite: str = NEWER_SUITE) -> Path:
    """A folder with the programs of this suite's engine, which supports containerd's image store; cached.

    Raises BedUnavailable.
    """
    programs = ("dockerd", "docker-proxy", "containerd", "containerd-shim-runc-v2")
    return _kept(
        settings.cache / f"engine-{suite}",
        ["docker.io", "containerd"],
        suite,
        {f"usr/*bin/{program}": program for program in programs},
    )


def login_shells(settings: Settings) -> Path:
    """A folder with tcsh, zsh and fish, to be copied onto a node's /; cached. Raises BedUnavailable."""
    return _kept(
        settings.cache / f"shells-{BASE_SUITE}",
        ["tcsh", "zsh", "fish", "fish-common", "libpcre2-32-0"],
        BASE_SUITE,
        {
            **{f"**/bin/{shell}": f"usr/local/bin/{shell}" for shell in ("tcsh", "zsh", "fish")},
            "**/libpcre2-32.so.0": "usr/local/lib/libpcre2-32.so.0",
            **{(path := f"usr/share/fish/{name}"): path for name in ("config.fish", "functions")},
        },
    )


def podman(settings: Settings) -> Path:
    """A folder with podman and its dependencies except runc, for a node; cached. Raises BedUnavailable."""
    libraries = {"gpgme.so.11": "libgpgme11", "assuan.so.0": "libassuan0", "glib-2.0.so.0": "libglib2.0-0"}
    programs = ("usr/bin/podman", "usr/bin/conmon", "usr/lib/podman/netavark")
    settings_files = ("etc/containers/policy.json", "usr/share/containers/seccomp.json")
    return _kept(
        settings.cache / f"podman-{BASE_SUITE}",
        [
            *("podman", "conmon", "catatonit", "netavark", "libsubid4", *libraries.values()),
            *("golang-github-containers-common", "golang-github-containers-image"),
        ],
        BASE_SUITE,
        {
            **{path: path for path in (*programs, *settings_files)},
            "usr/bin/catatonit": "usr/libexec/podman/catatonit",
            **{f"**/lib{name}": f"usr/local/lib/lib{name}" for name in (*libraries, "subid.so.4")},
        },
    )


def rootless(settings: Settings) -> Path:
    """A folder with programs that a rootless engine needs besides Docker, for a node; cached. Raises BedUnavailable."""
    programs = ("rootlesskit", "rootlesskit-docker-proxy", "newuidmap", "newgidmap", "slirp4netns")
    libraries = {"slirp.so.0": "libslirp0", "subid.so.4": "libsubid4", "glib-2.0.so.0": "libglib2.0-0"}
    return _kept(
        settings.cache / f"rootless-{BASE_SUITE}",
        ["rootlesskit", "uidmap", "slirp4netns", *libraries.values()],
        BASE_SUITE,
        {
            **{f"usr/bin/{name}": f"usr/bin/{name}" for name in programs},
            **{f"**/lib{name}": f"usr/local/lib/lib{name}" for name in libraries},
        },
    )


def _kept(kept: Path, packages: Sequence[str], suite: str, files: Mapping[str, str]) -> Path:
    """A folder with files of these packages, {path in the package: path in the folder}; cached."""
    with locked_file(kept.with_suffix(".lock")):  # the workers of a test run share the folder
        if kept.exists():
            return kept
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            raise BedUnavailable(f"only root on Debian can unpack {suite}'s {', '.join(packages)}")
        partial = kept.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        with unpacked(packages, suite) as folder:
            for pattern, name in files.items():
                [found] = folder.glob(pattern)
                target = partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                (shutil.copytree if found.is_dir() else shutil.copy)(found, target)
        partial.rename(kept)
        return kept


@contextlib.contextmanager
def unpacked(packages: Sequence[str], suite: str, *, dependencies: bool = False) -> Iterator[Path]:
    """The files of these packages of a Debian suite; nothing is installed. dependencies: also those, from libc on."""
    archive = debian_archive()
    with tempfile.TemporaryDirectory(prefix="launcher-bed-") as folder:
        temporary = Path(folder)
        temporary.chmod(0o755)  # apt downloads as an unprivileged user
        for part in ("lists/partial", "cache/archives/partial"):
            (temporary / part).mkdir(parents=True)
        signed = f" [signed-by={archive.signed_by}]" if archive.signed_by else ""
        (temporary / "sources.list").write_text(f"deb{signed} {archive.uri} {suite} main\n")
        options = [
            *("-o", f"Dir::Etc::sourcelist={temporary}/sources.list", "-o", "Dir::Etc::sourceparts=/dev/null"),
            *("-o", f"Dir::State::lists={temporary}/lists", "-o", f"Dir::Cache={temporary}/cache"),
            *("-o", "APT::Sandbox::User=root"),
        ]
        run(["apt-get", *options, "update", "-q"])
        if dependencies:
            nothing = ("-o", "Dir::State::status=/dev/null", "--no-install-recommends", "--download-only", "-qy")
            run(["apt-get", *options, *nothing, "install", *packages])
            debs = [*temporary.glob("cache/archives/*.deb")]
        else:
            run(["env", "-C", folder, "apt-get", *options, "download", *packages])
            debs = [deb for package in packages for deb in temporary.glob(f"{package}_*.deb")]
        for deb in debs:
            run(["dpkg-deb", "-x", str(deb), str(temporary / "unpacked")])
        yield temporary / "unpacked"


def start_engine(settings: Settings, timeout: float = 60) -> None:
    """Starts dockerd, detached, after removing stale pid files of a killed one. Raises BedUnavailable."""
    if _wait_for_engine(1 if _alive(Path("/var/run/docker.pid")) is None else timeout):
        return
    for pid_file in (Path("/var/run/docker.pid"), Path("/var/run/docker/containerd/containerd.pid")):
        if _alive(pid_file) is None:
            pid_file.unlink(missing_ok=True)
    settings.cache.mkdir(parents=True, exist_ok=True)
    log = settings.cache / "dockerd.log"
    dockerd = shutil.which("dockerd", path=os.environ.get("PATH", "") + ":/usr/sbin")
    if dockerd is None:
        raise BedUnavailable("no dockerd on this machine after installing its package")
    with log.open("ab") as sink:
        process = subprocess.Popen(
            [dockerd], stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
    _started_by_us(settings).write_text(str(process.pid))
    if not _wait_for_engine(timeout):
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise BedUnavailable(
            f"dockerd did not answer within {timeout:.0f} s, its log {log} ends with: {' '.join(last)}"
        )


def stop_engine(settings: Settings) -> bool:
    """Stops the dockerd that `start_engine` started; returns whether it was still running."""
    pid = _alive(_started_by_us(settings))
    _started_by_us(settings).unlink(missing_ok=True)
    if pid is None:
        return False
    os.kill(pid, 15)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return True


def _started_by_us(settings: Settings) -> Path:
    return settings.cache / "dockerd.pid"


def _alive(pid_file: Path) -> int | None:
    """The pid in the file if that process is an engine, not an unrelated process that reused the pid."""
    try:
        pid = int(pid_file.read_text())
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    # A killed engine may remain as a zombie if the machine's pid 1 does not reap.
    dead = re.search(r"^State:\s+[ZX]", status, re.MULTILINE)
    engine = re.match(r"Name:\s+(dockerd|containerd)\n", status)
    return pid if engine and not dead else None


def _wait_for_engine(timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not engine_answers():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def docker(*argv: str, timeout: float = 300) -> str:
    """Runs `docker ARGV` on this machine's engine; returns its standard output, stripped. Raises CommandFailed."""
    return output(["docker", *argv], timeout=timeout)
