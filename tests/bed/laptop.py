"""Callers that differ from the nodes: a connection with byte counts, an engine of another architecture, a Mac."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shlex
import socket
import stat
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.bed.bed import Bed
from tests.bed.host import docker

_PIECE = 1 << 20
_ENGINE = "/var/run/docker.sock"
# Same length as the original, so that the length of a response does not change
_FOREIGN = {
    b'"Architecture":"amd64"': b'"Architecture":"arm64"',
    b'"Architecture":"x86_64"': b'"Architecture":"arm64" ',
    b'"Arch":"amd64"': b'"Arch":"arm64"',
}
# A ProxyCommand. Arguments: address, port, folder; a file per connection in it has the bytes sent up and down.
_LINE = """
import os, selectors, socket, sys
address, port, folder = sys.argv[1:]
remote = socket.create_connection((address, int(port)))
count = os.open(os.path.join(folder, str(os.getpid())), os.O_CREAT | os.O_WRONLY)
moved, ways = [0, 0], selectors.DefaultSelector()
ways.register(0, selectors.EVENT_READ, (0, remote.fileno()))
ways.register(remote, selectors.EVENT_READ, (1, 1))
while len(ways.get_map()) == 2:
    for key, _ in ways.select():
        way, to = key.data
        data = left = os.read(key.fd, 1 << 16)
        moved[way] += len(data)
        os.pwrite(count, b"%020d %020d" % tuple(moved), 0)
        while left:
            left = left[os.write(to, left):]
        if not data:
            ways.unregister(key.fileobj)
"""
# Makes Python behave as on a Mac: functions specific to Linux are missing or abort the command.
_MAC = """
import os, select, sys, sysconfig, types
sysconfig.get_config_vars()  # cached now: those of a Mac are not available
sys.platform = "darwin"
proxies = types.ModuleType("_scproxy")  # used by urllib.request on a Mac
proxies._get_proxy_settings = proxies._get_proxies = dict
sys.modules["_scproxy"] = proxies
for name in ("pidfd_open", "memfd_create", "eventfd", "splice", "posix_fallocate", "posix_fadvise", "copy_file_range",
             "getrandom", "getxattr", "setxattr", "unshare", "setns", "O_TMPFILE", "O_PATH", "O_DIRECT",
             *(name for name in dir(os) if name.startswith("sched_") and name != "sched_yield")):
    if hasattr(os, name):
        delattr(os, name)
del select.epoll
def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/", "/dev/shm")):
        sys.stderr.write(f"ONLY ON LINUX: {arguments[0]}\\n")
        os._exit(97)
    if event in ("socket.bind", "socket.connect") and len(str(arguments[1])) > 103 and isinstance(arguments[1], str):
        sys.stderr.write(f"TOO LONG FOR A SOCKET: {arguments[1]}\\n")
        os._exit(97)
sys.addaudithook(refuse)
"""
# Programs that a Mac lacks, or has with other options. A run must not need them on the caller.
_GNU_PROGRAMS = ("find", "tail", "head", "stat", "cp", "timeout", "nproc", "ip", "sha256sum", "readlink", "setsid")


class Line:
    """The bytes on all ssh connections of the launcher, each way."""

    def __init__(self, config: Path, folder: Path) -> None:
        self.config = config
        self._folder = folder

    def moved(self) -> tuple[int, int]:
        """(up: sent by the caller, down)."""
        counts = [tuple(map(int, file.read_text().split())) for file in self._folder.iterdir() if file.stat().st_size]
        return sum(up for up, _ in counts), sum(down for _, down in counts)


def counted(bed: Bed, folder: Path) -> Line:
    """Return an ssh config with the bed's aliases, for the launcher only, through a proxy that counts bytes."""
    program, counts, config = folder / "line.py", folder / "counts", folder / "counted_ssh_config"
    program.write_text(_LINE)
    counts.mkdir()
    command = shlex.join([sys.executable, "-S", str(program), "%h", "%p", str(counts)])
    through = f"Host *\n    ProxyCommand {command}\n\n"
    config.write_text(through + bed.ssh_config.read_text())  # OpenSSH uses the first value it finds
    return Line(config, counts)


@contextlib.contextmanager
def foreign_engine(folder: Path) -> Iterator[str]:
    """Yield a DOCKER_HOST: this machine's engine, with arm64 reported as the architecture of it and of all images."""
    path = folder / "foreign.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        try:
            yield f"unix://{path}"
        finally:
            path.unlink()
            listener.shutdown(socket.SHUT_RDWR)  # makes accept() return


def load_foreign(folder: Path, name: str) -> None:
    """Load an arm64 image with one small layer into this machine's engine."""
    layer = _tar({"file": b"for another machine"})
    digest = hashlib.sha256(layer).hexdigest()
    config = {"architecture": "arm64", "os": "linux", "config": {}}
    config["rootfs"] = {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    parts = {"config.json": json.dumps(config), "manifest.json": json.dumps(manifest)}
    archive = folder / "foreign.tar"
    archive.write_bytes(_tar({"layer.tar": layer, **{name: text.encode() for name, text in parts.items()}}))
    docker("load", "-i", str(archive))
    assert docker("image", "inspect", "-f", "{{.Architecture}}", name) == "arm64"


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _accept(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            near = listener.accept()[0]
            far = socket.socket(socket.AF_UNIX)
            far.connect(_ENGINE)
            threading.Thread(target=_forward, args=(near, far, {}), daemon=True).start()
            threading.Thread(target=_forward, args=(far, near, _FOREIGN), daemon=True).start()


def _forward(source: socket.socket, sink: socket.socket, changes: Mapping[bytes, bytes]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_PIECE):
            for old, new in changes.items():
                data = data.replace(old, new)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def mac(folder: Path) -> dict[str, str]:
    """Return the environment of a launcher that behaves as on a Mac, without GNU programs."""
    site, programs = folder / "mac", folder / "mac" / "bin"
    programs.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(_MAC)
    for name in _GNU_PROGRAMS:
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{site}/called\necho "not GNU" >&2\nexit 64\n')
        (programs / name).chmod(stat.S_IRWXU)
    root = Path(__file__).resolve().parents[2]
    return {"PYTHONPATH": f"{site}:{root}", "PATH": f"{programs}:{os.environ['PATH']}"}


def called(folder: Path) -> list[str]:
    """Return the calls of programs that a Mac lacks or has with other options."""
    log = folder / "mac" / "called"
    return log.read_text().splitlines() if log.exists() else []
