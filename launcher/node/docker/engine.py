"""A Docker engine as an Engine: on this machine's socket or behind ssh, the same code."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import TypeAlias, cast

from docker import APIClient
from docker.errors import APIError

from launcher.errors import ContainerGone, EngineFailed, EngineUnavailable, NameTaken, NodeUnreachable
from launcher.model import labels as names
from launcher.model.container import KIT, WANTED_ULIMITS, ContainerSpec, ContainerState, Phase
from launcher.model.facts import EngineFacts, NodeFacts
from launcher.model.forward import Forward
from launcher.node import cache, docker_exec, login_shell
from launcher.node import facts as node_facts
from launcher.node.docker.client import Dial, DockerClient, found, ids
from launcher.node.docker.images import DockerImages
from launcher.node.docker.values import container_request, container_state, engine_facts, label_filter
from launcher.node.engine import Engine
from launcher.node.machine import Machine
from launcher.node.parallel import run_both

_REMOVAL_TIMEOUT = 60
_RETRY_PAUSE = 1.0  # seconds between tries to reach a node that is away
_SHORTEST_ROUND = 0.1  # seconds
_NO_RLIMIT = "rlimit"  # runc: "error setting rlimit type 8", crun: "setrlimit `RLIMIT_MEMLOCK`"

Ulimits: TypeAlias = tuple[tuple[str, int], ...]


class DockerEngine(Engine):
    """Every call may be repeated: what is done already is no error.

    `dial` makes a connection when one is needed. `ssh`: (host, ssh config) where the OpenSSH client may load images.
    """

    def __init__(
        self, node: str, host: str, machine: Machine, dial: Dial, ssh: tuple[str, str | None] | None = None
    ) -> None:
        super().__init__(node, host, machine)
        self._client = DockerClient(node, machine.user, dial, machine.limits)
        self._images = DockerImages(self._client, ssh)
        self._facts: EngineFacts | None = None  # once it was asked

    def open(self) -> None:
        """Make sure that the engine answers. Raises NodeUnreachable, EngineUnavailable, EngineForbidden, ..."""
        login_shell.blamed(self.machine, self.host, self._client.ping)

    @property
    def images(self) -> DockerImages:
        return self._images

    def facts(self) -> NodeFacts:
        """Raises NodeUnfit when the script did not run to its end, NodeUnreachable, EngineUnavailable."""
        engine, seen = login_shell.blamed(self.machine, self.host, lambda: run_both(self._identify, self.look))
        free = seen.docker_disk_free
        if engine.root_dir not in ("", node_facts.DOCKER_ROOT):
            free = node_facts.free_space(self.machine.run(["df", "-Pk", "--", engine.root_dir]).out)
        return replace(seen.node, engine=replace(engine, disk_free=free))

    def create(self, spec: ContainerSpec) -> str:
        """Raises NameTaken, NodeUnfit (no image, no GPU, a mount's source is missing), EngineFailed."""
        body = container_request(spec)
        asked = 0

        def ask(api: APIClient) -> str:
            nonlocal asked
            asked += 1
            try:
                return str(api.create_container_from_config(body, spec.name)["Id"])
            except APIError as refusal:
                # the answer to the first try may have been lost on the way
                if asked > 1 and refusal.status_code == HTTPStatus.CONFLICT:
                    holder = container_state(api.inspect_container(spec.name))
                    if holder.phase is Phase.CREATED and dict(spec.labels).items() <= dict(holder.labels).items():
                        return holder.id
                raise

        return self._client.ask(f"create container {spec.name}", ask)

    def claim(self, name: str, image: str, labels: Mapping[str, str]) -> ContainerState | None:
        """The engine gives a container's name to one only. Raises EngineFailed, NodeUnfit."""
        while True:
            try:
                self.create(_bare(name, image, labels))
            except NameTaken:
                if holder := self._inspect(name):  # None: let go since
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
        """Raises ContainerGone when there is no such container."""
        if state := self._inspect(container):
            return state
        raise ContainerGone(self.node, f"container {container} is gone", "it was removed: see `docker events` there")

    def wait(self, container: str, timeout: float) -> ContainerState:
        """Comes back to a node that was away, within the time limit. Raises ContainerGone when it was removed."""
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
            if time.monotonic() - began < _SHORTEST_ROUND:  # it restarts, and the engine answers at once
                self._client.pause(_SHORTEST_ROUND)

    def stop(self, container: str, grace: float) -> ContainerState:
        seconds = max(0, math.ceil(grace))
        self._client.ask(f"stop {container}", lambda api: api.stop(container, timeout=seconds))
        return self.inspect(container)

    def signal(self, container: str, name: str) -> None:
        def ask(api: APIClient) -> None:
            try:
                api.kill(container, f"SIG{name}")
            except APIError as refusal:
                if refusal.status_code != HTTPStatus.CONFLICT:  # it has ended
                    raise

        self._client.find(f"send SIG{name} to {container}", ask)

    def remove(self, container: str, *, force: bool = False) -> None:
        """Its anonymous volumes go with it. Raises EngineFailed for one that still runs; force: that one goes too."""

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

    def interact(self, container: str, argv: Sequence[str], *, terminal: bool, ports: Sequence[Forward] = ()) -> int:
        """Raises NodeUnreachable, NodeUnfit."""
        within = ("sh", f"{KIT}/within.sh", *argv)
        return docker_exec.run(self.machine, container, within, terminal=terminal, ports=ports)

    def guard(self, container: str) -> contextlib.AbstractContextManager[object]:
        return docker_exec.guard(self.machine, container)

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
                self.remove(container, force=True)

    def granted_ulimits(self, image: str) -> Ulimits:
        """The image's `true` is run for it, or at least looked for. Raises what run_probe() raises."""
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
        self._facts = self._client.ask("ask the engine what it is", lambda api: engine_facts(api.info()))
        return self._facts

    def _wait_once(self, container: str, phase: Phase, deadline: float) -> None:
        """Until the engine answers, the time is over or the connection is lost, which the next inspect() tells."""
        created = phase is Phase.CREATED  # `not-running` is true of it now, and its start would be missed
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
                return True  # limits are set before the program is looked for
            raise
        return True


def granted(wanted: Ulimits, starts_with: Callable[[Ulimits], bool]) -> Ulimits:
    """Those that are granted: all at once as a rule, one by one where that fails.

    An engine in a restricted container refuses memlock=-1 (`error setting rlimit`), and then no container starts.
    """
    return wanted if starts_with(wanted) else tuple(limit for limit in wanted if starts_with((limit,)))


def _bare(name: str, image: str, labels: Mapping[str, str]) -> ContainerSpec:
    """A container that needs nothing and touches nothing."""
    return ContainerSpec(name, image, ("true",), labels=labels, ipc="private", network="none", init=False)
