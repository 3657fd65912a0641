"""A Docker engine as an Engine: on this machine's socket or behind ssh, the same code."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from launcher.errors import EngineFailed, NameTaken, NodeUnfit
from launcher.model import labels as names
from launcher.model.container import WANTED_ULIMITS, ContainerSpec, ContainerState, Layout, Phase
from launcher.model.facts import NodeFacts, Reach
from launcher.node import docker_exec, shm_cleanup
from launcher.node import facts as look
from launcher.node.docker import ulimits
from launcher.node.docker.api import API_TIMEOUT, Api, Missing, Refused, segment, unframed
from launcher.node.docker.calls import Calls
from launcher.node.docker.errors import NONSENSE, nonsense
from launcher.node.docker.exchange import Wire
from launcher.node.docker.images import DockerImages, label_filter
from launcher.node.docker.values import container_request, container_state, engine_facts
from launcher.node.engine import Files, Images
from launcher.node.machine import Machine, run_script
from launcher.node.parallel import run_both

if TYPE_CHECKING:  # it loads docker-py
    from launcher.node.docker.bulk import Bulk

_FACTS_TIMEOUT = 60.0
_REMOVAL_TIMEOUT = 60
_NO_RLIMIT = ("rlimit",)  # runc: "error setting rlimit type 8", crun: "setrlimit `RLIMIT_MEMLOCK`"

_Answer = Mapping[str, object]


class DockerEngine:
    """Implements Engine. Every call may be repeated: what is done already is no error.

    `dial` makes a connection; `make_bulk` what carries whole images. Both are called when first needed.
    """

    def __init__(
        self,
        node: str,
        host: str,
        machine: Machine,
        files: Files,
        dial: Callable[[], Wire],
        make_bulk: Callable[[], Bulk],
        ssh: tuple[str, str | None] | None = None,
    ) -> None:
        self.node = node
        self.host = host
        self.machine = machine
        self.files = files
        self._call = Calls(node, machine, Api(dial))
        self._images = DockerImages(node, self._call, make_bulk, ssh)
        self._identity: tuple[str, str] | None = None  # the engine's id and version, once it was asked

    def open(self) -> None:
        """Make sure that the engine answers. Raises NodeUnreachable, EngineUnavailable, EngineForbidden, ..."""
        self._call("talk to the engine", lambda api: api.read("/_ping"))

    @property
    def images(self) -> Images:
        return self._images

    def facts(self, images: Sequence[str] = ()) -> NodeFacts:
        """Raises NodeUnfit when the script did not run to its end, NodeUnreachable, EngineUnavailable."""
        (info, found), done = run_both(
            lambda: self._engine_answers(images),
            lambda: run_script(self.machine, look.script(), timeout=_FACTS_TIMEOUT),
        )
        seen = look.parse(done.out)
        if not seen.complete or seen.uid < 0 or not seen.home:
            raise NodeUnfit(
                self.node,
                f"its shell does not run our look at it (exit code {done.code}): {done.complaint[-300:]}",
                f"`echo 'echo works' | ssh {self.host} sh -s` must print works",
            )
        try:
            engine = engine_facts(info, found, seen.docker_disk_free)
        except NONSENSE as error:
            raise nonsense(self.node, "learn what its engine is", error) from error
        if engine.root_dir and engine.root_dir != look.DOCKER_ROOT:
            elsewhere = self.machine.run(["df", "-Pk", "--", engine.root_dir])
            engine = replace(engine, disk_free=look.free_space(elsewhere.out))
        return look.node_facts(self.node, self.host, seen, done.started, done.first, engine)

    def create(self, spec: ContainerSpec) -> str:
        """Raises NameTaken, NodeUnfit (no image, no GPU, a mount's source is missing), EngineFailed."""
        body = container_request(spec)
        asked = 0

        def ask(api: Api) -> str:
            nonlocal asked
            asked += 1
            try:
                return str(json.loads(api.post("/containers/create", {"name": spec.name}, body))["Id"])
            except Refused as refusal:
                # the answer to the first try may have been lost on the way
                if asked > 1 and refusal.status == 409:
                    found = container_state(api.get(f"{_path(spec.name)}/json"))
                    if found.phase is Phase.CREATED and dict(spec.labels).items() <= dict(found.labels).items():
                        return found.id
                raise

        return self._call(f"create container {spec.name}", ask)

    def claim(self, name: str, image: str, labels: Mapping[str, str]) -> ContainerState | None:
        """The engine gives a container's name to one only. Raises EngineFailed, NodeUnfit."""
        while True:
            try:
                self.create(_bare(name, image, labels))
            except NameTaken:
                holder = self._look(name)
                if holder is not None:  # None: let go since
                    return holder
            else:
                return None

    def put(self, container: str, archive: bytes) -> None:
        query = {"path": "/"}
        self._call(f"put files into {container}", lambda api: api.put(f"{_path(container)}/archive", query, archive))

    def start(self, container: str) -> None:
        self._call(f"start {container}", lambda api: api.post(f"{_path(container)}/start"))

    def list(self, labels: Mapping[str, str | None]) -> Sequence[ContainerState]:
        query = {"all": "1", **label_filter(labels)}

        def ask(api: Api) -> Sequence[str]:
            return [str(container["Id"]) for container in api.get("/containers/json", query)]

        states = []
        for container in self._call("list containers", ask):
            state = self._look(container)
            if state is not None:  # None: gone since the list was made
                states.append(state)
        return states

    def inspect(self, container: str) -> ContainerState:
        """Raises EngineFailed when there is no such container."""
        state = self._look(container)
        if state is None:
            raise EngineFailed(self.node, f"container {container} is gone", "somebody removed it: see `docker events`")
        return state

    def wait(self, container: str, timeout: float) -> ContainerState:
        """Comes back to a node that was away, within the time limit. Raises EngineFailed when the container is gone."""
        deadline = time.monotonic() + timeout
        while True:
            state = self._call.patiently(lambda: self.inspect(container), deadline)
            left = deadline - time.monotonic()
            if state.phase.ended or left <= 0:
                return state
            asked = time.monotonic()
            if state.phase is Phase.CREATED:  # `not-running` is true of it now, and its start would be missed
                self._call.until(container, "next-exit", min(left, 1.0))
            else:
                self._call.until(container, "not-running", left)
            if time.monotonic() - asked < 0.1:  # an engine that answers at once while the container restarts
                self._call.pause(min(0.1, left))

    def stop(self, container: str, grace: float) -> ContainerState:
        seconds = max(0, math.ceil(grace))
        path, query, limit = f"{_path(container)}/stop", {"t": seconds}, API_TIMEOUT + seconds
        self._call(f"stop {container}", lambda api: api.post(path, query, timeout=limit))
        return self.inspect(container)

    def signal(self, container: str, name: str) -> None:
        def ask(api: Api) -> None:
            try:
                api.post(f"{_path(container)}/kill", {"signal": f"SIG{name}"})
            except Refused as refusal:
                if refusal.status not in (404, 409):  # it is gone, or has ended
                    raise

        self._call(f"send SIG{name} to {container}", ask)

    def remove(self, container: str) -> None:
        """Its anonymous volumes go with it. Raises EngineFailed for one that still runs."""
        self._remove(container, force=False)

    def logs(self, container: str, tail: int = 200) -> bytes:
        path, query = f"{_path(container)}/logs", {"stdout": "1", "stderr": "1", "tail": tail}
        return self._call(f"read the log of {container}", lambda api: unframed(api.read(path, query)))

    def interact(self, container: str, argv: Sequence[str], *, terminal: bool) -> int:
        """Raises NodeUnreachable, NodeUnfit."""
        return docker_exec.run(self.machine, container, argv, terminal=terminal)

    def guard(self, container: str) -> contextlib.AbstractContextManager[object]:
        """Raises NodeUnreachable."""
        return self.machine.kill_on_disconnect(docker_exec.guard(container))

    def run_probe(self, spec: ContainerSpec, timeout: float = 60) -> tuple[int, bytes]:
        """Raises what create() and start() raise, EngineFailed when it does not end in time."""
        with self.guard(spec.name):
            container = self.create(spec)
            try:
                self.start(container)
                state = self.wait(container, timeout)
                output = self.logs(container, tail=100_000)
                if state.exit_code is None:
                    words = output[-300:].decode(errors="replace")
                    raise EngineFailed(self.node, f"container {spec.name} did not end in {timeout:g} s: {words}")
                return state.exit_code, output
            finally:
                self._remove(container, force=True)

    def granted_ulimits(self, image: str) -> tuple[tuple[str, int], ...]:
        """The image's `true` is run for it, or at least looked for. Raises what run_probe() raises."""
        if self._identity is None:
            self._engine_answers(())
        file = ulimits.cache_file(self._identity or ("", ""), WANTED_ULIMITS)
        known = ulimits.remembered(file, WANTED_ULIMITS)
        if known is None:
            known = ulimits.find(WANTED_ULIMITS, lambda limits: self._starts_with(image, limits))
            with contextlib.suppress(OSError):  # no cache can be written: it is tried again the next time
                ulimits.remember(file, known)
        return known

    def sweep_shared_memory(self, since: float) -> Sequence[str]:
        done = run_script(self.machine, shm_cleanup.SCRIPT, str(math.floor(since)))
        if done.code:
            raise EngineFailed(self.node, f"could not look through /dev/shm: {done.complaint}")
        return shm_cleanup.removed(done.out)

    def reach(self, address: str, port: int, timeout: float, expect: str | None = None) -> Reach:
        return self.machine.reach(address, port, timeout, expect)

    def sh(self, script: str, *arguments: str, timeout: float = 60) -> bytes:
        return run_script(self.machine, script, *arguments, timeout=timeout).out

    def host_key(self) -> str | None:
        return self.machine.host_key()

    def ssh_port(self) -> int | None:
        return self.machine.ssh_port()

    def close(self) -> None:
        self._call.close()
        self._images.close()

    def _engine_answers(self, images: Sequence[str]) -> tuple[_Answer, Sequence[str]]:
        found = [image.id for reference in images if (image := self._images.inspect(reference)) is not None]

        def ask(api: Api) -> _Answer:
            info: _Answer = api.get("/info")
            self._identity = str(info.get("ID", "")), str(info.get("ServerVersion", ""))
            return info

        return self._call("ask the engine what it is", ask), found

    def _look(self, container: str) -> ContainerState | None:
        def ask(api: Api) -> ContainerState | None:
            try:
                return container_state(api.get(f"{_path(container)}/json"))
            except Missing:
                return None

        return self._call(f"look at {container}", ask)

    def _starts_with(self, image: str, limits: Sequence[tuple[str, int]]) -> bool:
        bare = _bare(f"launcher-probe-{secrets.token_hex(6)}", image, {names.PURPOSE: "probe"})
        spec = replace(bare, ulimits=tuple(limits))
        try:
            self.run_probe(spec)
        except EngineFailed as error:
            if any(word in error.what for word in _NO_RLIMIT):
                return False
            if "executable file not found" in error.what or "no such file" in error.what:
                return True  # limits are set before the program is looked for
            raise
        return True

    def _remove(self, container: str, *, force: bool) -> None:
        def ask(api: Api) -> None:
            try:
                api.delete(_path(container), {"v": "1", "force": "1" if force else "0"})
            except Missing:
                return
            except Refused as refusal:
                if refusal.status != 409 or "already in progress" not in refusal.words:
                    raise
                with contextlib.suppress(Missing):  # gone before we could wait for it
                    api.post(f"{_path(container)}/wait", {"condition": "removed"}, timeout=_REMOVAL_TIMEOUT)

        self._call(f"remove {container}", ask)


def _path(container: str) -> str:
    return f"/containers/{segment(container)}"


def _bare(name: str, image: str, labels: Mapping[str, str]) -> ContainerSpec:
    """A container that needs nothing and touches nothing."""
    return ContainerSpec(
        name=name,
        image=image,
        argv=("true",),
        env={},
        labels=labels,
        layout=Layout("", "", ""),
        output_dir="",
        user="",
        ipc="private",
        network="none",
        init=False,
    )
