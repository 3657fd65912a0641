"""The Engine implementation for Docker, local or over ssh."""

from __future__ import annotations

import contextlib
import io
import math
import secrets
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TypeAlias, cast
from urllib.parse import quote

import requests
from docker import APIClient
from docker.errors import APIError

from launcher.errors import ContainerGone, EngineFailed, EngineUnavailable, NameTaken, NodeUnreachable
from launcher.model import labels as names
from launcher.model.container import KIT, TOOL, WANTED_ULIMITS, ContainerSpec, ContainerState, Phase, Tool
from launcher.model.facts import EngineFacts, NodeFacts
from launcher.model.forward import Forward
from launcher.model.sizes import counted
from launcher.node import cache, docker_exec, login_shell
from launcher.node import facts as node_facts
from launcher.node.docker.client import CONNECTIONS, Dial, DockerClient, checked, found, ids
from launcher.node.docker.images import DockerImages
from launcher.node.docker.values import (
    container_request,
    container_state,
    engine_facts,
    file_of_container,
    label_filter,
    tool_argv,
    wrote_outside,
)
from launcher.node.engine import GROWN_WITHIN, Engine
from launcher.node.files import FileEntry
from launcher.node.machine import PIECE, CommandStream, Machine
from launcher.node.parallel import in_background, run_both

_REMOVAL_TIMEOUT = 60
_RETRY_PAUSE = 1.0  # seconds between attempts to reach an unreachable node
_SHORTEST_ROUND = 0.1  # seconds
_GROWN = 1 << 20  # bytes of a program in its container's own layer that are worth a word
_OWN = 1 << 18  # bytes; at most so many of the launcher's are there
_DELETED = 2  # a kind of change
_NO_RLIMIT = "rlimit"  # runc: "error setting rlimit type 8", crun: "setrlimit `RLIMIT_MEMLOCK`"

Ulimits: TypeAlias = tuple[tuple[str, int], ...]


class DockerEngine(Engine):
    """Calls are idempotent.

    `dial` opens a connection on demand. `ssh`: (host, ssh config) if the OpenSSH client may load images.
    """

    def __init__(
        self, node: str, host: str, machine: Machine, dial: Dial, ssh: tuple[str, str | None] | None = None
    ) -> None:
        super().__init__(node, host, machine)
        self._client = DockerClient(node, machine.user, dial, machine.limits)
        self._images = DockerImages(self._client, ssh)
        self._facts: EngineFacts | None = None  # None: not requested yet

    def open(self) -> None:
        """Check that the engine answers. Raises NodeUnreachable, EngineUnavailable, EngineForbidden, ..."""
        login_shell.diagnosed(self.machine, self._client.ping)

    @property
    def images(self) -> DockerImages:
        return self._images

    def facts(self) -> NodeFacts:
        """Raises NodeUnfit if the facts script failed, NodeUnreachable, EngineUnavailable."""
        engine, seen = login_shell.diagnosed(self.machine, lambda: run_both(self._identify, self.machine_facts))
        free, inodes = seen.docker_disk_free, seen.docker_inodes_free
        if engine.root_dir not in ("", node_facts.DOCKER_ROOT):
            printed = self.machine.run(["df", "-Pk", "--", engine.root_dir]).out
            free = node_facts.free_space(printed.decode("utf-8", "replace"))
            inodes = -1
        return replace(seen.node, engine=replace(engine, disk_free=free, inodes_free=inodes))

    def create(self, spec: ContainerSpec) -> str:
        """Raises NameTaken, NodeUnfit (no image, no GPU, missing mount source), EngineFailed."""
        body = container_request(spec)
        asked = 0

        def ask(api: APIClient) -> str:
            nonlocal asked
            asked += 1
            try:
                return str(api.create_container_from_config(body, spec.name)["Id"])
            except APIError as refusal:
                # the first attempt may have succeeded and its response been lost
                if asked > 1 and refusal.status_code == HTTPStatus.CONFLICT:
                    holder = container_state(api.inspect_container(spec.name))
                    if holder.phase is Phase.CREATED and dict(spec.labels).items() <= dict(holder.labels).items():
                        return holder.id
                raise

        return self._client.ask(f"create container {spec.name}", ask)

    def claim(self, name: str, image: str, labels: Mapping[str, str]) -> ContainerState | None:
        """Relies on container names being unique in an engine. Raises EngineFailed, NodeUnfit."""
        while True:
            try:
                self.create(_bare(name, image, labels))
            except NameTaken:
                if holder := self._inspect(name):  # None: released since
                    return holder
            else:
                return None

    def put(self, container: str, archive: bytes) -> None:
        self._client.ask(f"put files into {container}", lambda api: api.put_archive(container, "/", archive))

    def start(self, container: str) -> None:
        self._client.ask(f"start {container}", lambda api: api.start(container))

    def list(self, labels: Mapping[str, str | None]) -> Sequence[ContainerState]:
        wanted = label_filter(labels)
        listed = self._client.ask("list containers", lambda api: ids(api.containers(all=True, filters=wanted)))
        return found(self._inspect, listed)

    def inspect(self, container: str) -> ContainerState:
        """Raises ContainerGone if the container does not exist."""
        if state := self._inspect(container):
            return state
        raise ContainerGone(self.node, f"container {container} no longer exists", "see docker events on the node")

    def wait(self, container: str, timeout: float) -> ContainerState:
        """Retries within the time limit while the node is unreachable. Raises ContainerGone if it was removed."""
        deadline = time.monotonic() + timeout
        while True:
            began = time.monotonic()
            try:
                state = self.inspect(container)
            except (NodeUnreachable, EngineUnavailable):
                if began >= deadline or self._client.pause(min(_RETRY_PAUSE, deadline - began)):
                    raise
                continue
            if state.phase.ended or began >= deadline:
                return state
            self._wait_once(container, state.phase, deadline)
            if time.monotonic() - began < _SHORTEST_ROUND:  # it is restarting, and the engine answers immediately
                self._client.pause(_SHORTEST_ROUND)

    def stop(self, container: str, grace: float) -> ContainerState:
        seconds = max(0, math.ceil(grace))
        self._client.find(f"stop {container}", lambda api: api.stop(container, timeout=seconds))
        return self.inspect(container)

    def signal(self, container: str, name: str) -> None:
        def ask(api: APIClient) -> None:
            try:
                api.kill(container, f"SIG{name}")
            except APIError as refusal:
                if refusal.status_code != HTTPStatus.CONFLICT:  # it has exited
                    raise

        self._client.find(f"send SIG{name} to {container}", ask)

    def remove(self, container: str, *, force: bool = False) -> None:
        """Also removes its anonymous volumes. Raises EngineFailed if it is running, unless `force`."""

        def ask(api: APIClient) -> None:
            try:
                api.remove_container(container, v=True, force=force)
            except APIError as refusal:
                if refusal.status_code != HTTPStatus.CONFLICT or "already in progress" not in str(refusal.explanation):
                    raise
                api.wait(container, timeout=_REMOVAL_TIMEOUT, condition="removed")

        self._client.find(f"remove {container}", ask)

    def logs(self, container: str, tail: int = 200) -> bytes:
        return self._client.ask(f"read the log of {container}", lambda api: bytes(api.logs(container, tail=tail)))

    def grown(self, container: str, timeout: float | None = GROWN_WITHIN) -> Sequence[FileEntry]:
        """One request, unless the container's layer is larger than the launcher's own files make it."""
        asked = self._client.find(
            f"inspect {container}", lambda api: dict(_get(api, container, "json", size="1").json())
        )
        known = asked or {}
        layer = int(known.get("SizeRw") or 0)
        if layer < _GROWN + _OWN:
            return ()
        mounts = {str(mount.get("Destination")) for mount in known.get("Mounts") or ()}
        until = math.inf if timeout is None else time.monotonic() + timeout
        listing = in_background(partial(self._list_grown, container, mounts, until))
        late = timeout is not None and not listing.wait(timeout)
        if late or (files := listing()) is None:
            return (FileEntry("", layer, 0.0),)
        return files if sum(file.size for file in files) >= _GROWN else ()

    def _list_grown(self, container: str, mounts: set[str], until: float) -> Sequence[FileEntry] | None:
        """Return None if that takes longer than `until` (time.monotonic())."""
        doing = f"list what was written in {container}"
        changes = self._client.find(doing, lambda api: api.diff(container)) or ()
        paths = [str(each["Path"]) for each in changes if each["Kind"] != _DELETED]
        folders = {path.rpartition("/")[0] for path in paths}
        paths = [path for path in paths if path not in folders and wrote_outside(path, mounts)]

        def ask(path: str) -> tuple[str, str] | None:
            header = self._client.find(doing, lambda api: _head(api, container, path))
            return None if header is None else (path, header)

        stats: list[tuple[str, str]] = []
        for start in range(0, len(paths), CONNECTIONS):
            if time.monotonic() > until:
                return None
            stats += found(ask, paths[start : start + CONNECTIONS])
        if paths and not stats:  # not only removed meanwhile
            what = f"the engine cannot read the {counted(len(paths), 'file')} that were written in {container}"
            raise EngineFailed(self.node, what, "check that the folders that it mounts still exist")
        return [file for path, header in stats if (file := file_of_container(path, header))]

    def read_grown(self, container: str, file: FileEntry) -> Iterator[bytes]:
        doing, headers = f"read {file.path} of {container}", _GROWN
        with self._client.transfer(doing, EngineFailed, longest=file.size + headers) as api:
            answer = _get(api, container, "archive", stream=True, path=file.path)
            try:
                with tarfile.open(fileobj=_Pieces(answer.iter_content(PIECE)), mode="r|") as tar:
                    member = tar.next()
                    content = tar.extractfile(member) if member and member.size == file.size else None
                    if content is not None:
                        return (yield from iter(partial(content.read, PIECE), b""))
            except tarfile.TarError as error:
                raise EngineFailed(self.node, f"could not {doing}: {error}", "try again") from error
        raise EngineFailed(self.node, f"could not {doing}: it has changed", "try again")

    def interact(self, container: str, argv: Sequence[str], *, terminal: bool, ports: Sequence[Forward] = ()) -> int:
        """Raises NodeUnreachable, NodeUnfit."""
        within = ("sh", f"{KIT}/within.sh", *argv)
        return docker_exec.run(self.machine, container, within, terminal=terminal, ports=ports)

    def guard(self, container: str) -> contextlib.AbstractContextManager[object]:
        return docker_exec.guard(self.machine, container)

    def run_probe(self, spec: ContainerSpec, timeout: float = 60) -> tuple[int, bytes]:
        """Raises the errors of create() and start(), and EngineFailed if it does not exit in time."""
        with self.guard(spec.name):
            own = {**spec.labels, names.UID: str(self.uid())}
            container = self.create(replace(spec, labels=own, userns="host"))  # userns: for engines with userns-remap
            try:
                self.start(container)
                state = self.wait(container, timeout)
                output = self.logs(container, tail=100_000)
                if state.exit_code is None:
                    text = output[-300:].decode(errors="replace")
                    raise EngineFailed(self.node, f"container {spec.name} did not exit within {timeout:g} s: {text}")
                return state.exit_code, output
            finally:
                self.remove(container, force=True)

    def tool(self, wanted: Tool) -> CommandStream:
        """With the docker command, which ends with the connection, as does a tool that reads its stdin."""
        return self.machine.open(tool_argv(wanted, f"{TOOL}{secrets.token_hex(8)}", self.uid()))

    def granted_ulimits(self, image: str) -> Ulimits:
        """Tries to run `true` in the image. Raises the errors of run_probe()."""
        engine = self._facts or self._identify()
        key = cache.key((engine.id, engine.version), WANTED_ULIMITS)
        known = cache.get("ulimits", key)
        if not isinstance(known, list):
            known = [name for name, _ in granted(WANTED_ULIMITS, lambda limits: self._starts_with(image, limits))]
            cache.put("ulimits", key, known)
        return tuple(limit for limit in WANTED_ULIMITS if limit[0] in known)

    def close(self) -> None:
        self._client.close()

    def _identify(self) -> EngineFacts:
        self._facts = self._client.ask("get the engine's information", lambda api: engine_facts(api.info()))
        return self._facts

    def _wait_once(self, container: str, phase: Phase, deadline: float) -> None:
        """Wait until the container exits, the deadline or a lost connection, which the next inspect() reports."""
        created = phase is Phase.CREATED  # `not-running` already holds: wait() would return before it starts
        until = min(deadline, time.monotonic() + 1) if created else deadline

        def ask(api: APIClient) -> None:
            left = cast(int, max(0.01, until - time.monotonic()))
            api.wait(container, timeout=left, condition="next-exit" if created else "not-running")

        with contextlib.suppress(NodeUnreachable, EngineUnavailable):
            self._client.ask(f"wait for {container}", ask)

    def _inspect(self, container: str) -> ContainerState | None:
        return self._client.find(f"inspect {container}", lambda api: container_state(api.inspect_container(container)))

    def _starts_with(self, image: str, limits: Ulimits) -> bool:
        bare = _bare(f"launcher-probe-{secrets.token_hex(6)}", image, {names.PURPOSE: "probe"})
        try:
            self.run_probe(replace(bare, ulimits=limits))
        except EngineFailed as error:
            if _NO_RLIMIT in error.what:
                return False
            if "executable file not found" in error.what or "no such file" in error.what:
                return True  # limits are set before the program is searched for
            raise
        return True


def _get(api: APIClient, container: str, what: str, *, stream: bool = False, **params: str) -> requests.Response:
    """GET /containers/{id}/{what} with parameters that docker-py does not pass on."""
    return checked(api.get(_url(api, container, what), params=params, stream=stream, timeout=api.timeout))


def _head(api: APIClient, container: str, path: str) -> str:
    answer = checked(api.head(_url(api, container, "archive"), params={"path": path}, timeout=api.timeout))
    return str(answer.headers["X-Docker-Container-Path-Stat"])


def _url(api: APIClient, container: str, what: str) -> str:
    return f"{api.base_url}/v{api.api_version}/containers/{quote(container)}/{what}"


class _Pieces(io.RawIOBase):
    """Pieces of bytes as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def read(self, size: int = -1) -> bytes:
        while len(self._rest) < size and (piece := next(self._pieces, b"")):
            self._rest += piece
        found, self._rest = self._rest[:size], self._rest[size:]
        return found


def granted(wanted: Ulimits, starts_with: Callable[[Ulimits], bool]) -> Ulimits:
    """Return the granted limits: try all of them in one container, then one by one if that fails.

    An engine in a restricted container refuses memlock=-1 (`error setting rlimit`): no container starts with it.
    """
    return wanted if starts_with(wanted) else tuple(limit for limit in wanted if starts_with((limit,)))


def _bare(name: str, image: str, labels: Mapping[str, str]) -> ContainerSpec:
    """Return the spec of a container without GPUs, network and mounts that runs `true`."""
    return ContainerSpec(name, image, ("true",), labels=labels, docker={"ipc": "private"}, network="none", init=False)
