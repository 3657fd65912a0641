"""What is put into every created container before it starts: code, kit and secrets, owned by the run's user."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping

from launcher import container_scripts
from launcher.model.container import Layout
from launcher.records.snapshot import repack


def archive(layout: Layout, user: str, code: bytes, secrets: Mapping[str, str]) -> bytes:
    """A tar with names relative to /; `code` is a snapshot's archive, `secrets` are values by name.

    Secrets are files of mode 0600 inside the container: in no command line, label, `docker inspect` or image.
    """
    uid, gid = _owner(user)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:

        def folder(path: str, mode: int = 0o755) -> None:
            info = tarfile.TarInfo(path.strip("/"))
            info.type, info.mode, info.uid, info.gid = tarfile.DIRTYPE, mode, uid, gid
            tar.addfile(info)

        def file(path: str, data: bytes, mode: int) -> None:
            info = tarfile.TarInfo(path.strip("/"))
            info.size, info.mode, info.uid, info.gid = len(data), mode, uid, gid
            tar.addfile(info, io.BytesIO(data))

        folder(layout.kit)
        folder(f"{layout.kit}/home", 0o700)
        for name, script in container_scripts.scripts().items():
            file(f"{layout.kit}/{name}", script, 0o755)
        if secrets:
            folder(f"{layout.kit}/secrets", 0o700)
            for name, value in secrets.items():
                file(f"{layout.kit}/secrets/{name}", value.encode(), 0o600)
        folder(layout.code)
        for member, content in repack(code, layout.code.strip("/"), uid, gid):
            tar.addfile(member, io.BytesIO(content) if content is not None else None)
    return buffer.getvalue()


def _owner(user: str) -> tuple[int, int]:
    """(uid, gid) of "uid:gid"; root for the image's own user and for plain processes, where owners are ignored."""
    uid, _, gid = user.partition(":")
    return (int(uid), int(gid)) if uid else (0, 0)
