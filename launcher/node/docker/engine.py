"""A Docker engine as an Engine: on this machine's socket or behind ssh, the same code."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus

from docker import APIClient
from docker.errors import APIError, NotFound

from launcher.errors import EngineFailed, NameTaken
from launcher.model import labels as names
from launcher.model.container import WANTED_ULIMITS, ContainerSpec, ContainerState, Layout, Phase
from launcher.model.facts import NodeFacts, Reach
from launcher.node import docker_exec, shm_cleanup
from launcher.node import facts as node_facts
from launcher.node.docker import ulimits
from launcher.node.docker.client import Dial, DockerClient, found
from launcher.node.docker.errors import SDK_ERRORS, malformed_response
from launcher.node.docker.images import DockerImages
from launcher.node.docker.values import container_request, container_state, engine_facts, label_filter
from launcher.node.files import Files
from launcher.node.machine import Machine, run_script
from launcher.node.parallel import run_both

_REMOVAL_TIMEOUT = 60
_NO_RLIMIT = ("rlimit",)  # runc: "error setting rlimit type 8", crun: "setrlimit `RLIMIT_MEMLOCK`"

_Answer = Mapping[str, object]


class DockerEngine:
    """Implements Engine. Every call may be repeated: what is done already is no error.

    `dial` makes a connection when one is needed. `ssh`: (host, ssh config) where the OpenSSH client may load images.
    """

    def __init__(
        self,
        node: str,
        host: str,
        machine: Machine,
        files: Files,
        dial: Dial,
        ssh: tuple[str, str | None] | None = None,
    ) -> None:
        self.node = node
        self.host = host
        self.machine = machine
        self.files = files
        self._client = DockerClient(node, machine.user, dial)
        self._images = DockerImages(node, self._client, ssh)
        self._identity: tuple[str, str] | None = None  # the engine's id and version, once it was asked

    def open(self) -> None:
        """Make sure that the engine answers. Raises NodeUnreachable, EngineUnavailable, EngineForbidden, ..."""
        self._client.ping()

    @property
    def images(self) -> DockerImages:
        return self._images

    def facts(self, images: Sequence[str] = ()) -> NodeFacts:
        """Raises NodeUnfit when the script did not run to its end, NodeUnreachable, EngineUnavailable."""
        (info, present), seen = run_both(
            lambda: self._engine_answers(images), lambda: node_facts.look(self.machine, self.host)
        )
        try:
            engine = engine_facts(info, present, seen.docker_disk_free)
        except SDK_ERRORS as error:
            raise malformed_response(self.node, "ask the engine what it is", error) from error
        if engine.root_dir and engine.root_dir != node_facts.DOCKER_ROOT:
            elsewhere = self.machine.run(["df", "-Pk", "--", engine.root_dir])
            engine = replace(engine, disk_free=node_facts.free_space(elsewhere.out))
        return replace(seen.node, engine=engine)

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
                holder = self._look(name)
                if holder is not None:  # None: let go since
                    return holder
            else:
                return None

    def put(self, container: str, archive: bytes) -> None:
        self._client.ask(f"put files into {container}", lambda api: api.put_archive(container, "/", archive))

    def start(self, container: str) -> None:
        self._client.ask(f"start {container}", lambda api: api.start(container))

    def list(self, labels: Mapping[str, str | None]) -> Sequence[ContainerState]:
        def ask(api: APIClient) -> Sequence[str]:
            return [str(container["Id"]) for container in api.containers(all=True, filters=label_filter(labels))]

        return found(self._look, self._client.ask("list containers", ask))

    def inspect(self, container: str) -> ContainerState:
        """Raises EngineFailed when there is no such container."""
        state = self._look(container)
        if state is None:
            raise EngineFailed(
                self.node, f"container {container} is gone", "it was removed: see `docker events` on the node"
            )
        return state

    def wait(self, container: str, timeout: float) -> ContainerState:
        """Comes back to a node that was away, within the time limit. Raises EngineFailed when the container is gone."""
        deadline = time.monotonic() + timeout
        while True:
            state = self._client.until_there(lambda: self.inspect(container), deadline)
            left = deadline - time.monotonic()
            if state.phase.ended or left <= 0:
                return state
            asked = time.monotonic()
            if state.phase is Phase.CREATED:  # `not-running` is true of it now, and its start would be missed
                self._client.wait(container, "next-exit", min(left, 1.0))
            else:
                self._client.wait(container, "not-running", left)
            if time.monotonic() - asked < 0.1:  # an engine that answers at once while the container restarts
                self._client.pause(min(0.1, left))

    def stop(self, container: str, grace: float) -> ContainerState:
        seconds = max(0, math.ceil(grace))
        self._client.ask(f"stop {container}", lambda api: api.stop(container, timeout=seconds))
        return self.inspect(container)

    def signal(self, container: str, name: str) -> None:
        def ask(api: APIClient) -> None:
            try:
                api.kill(container, f"SIG{name}")
            except APIError as refusal:
                if refusal.status_code not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):  # it is gone, or has ended
                    raise

        self._client.ask(f"send SIG{name} to {container}", ask)

    def remove(self, container: str) -> None:
        """Its anonymous volumes go with it. Raises EngineFailed for one that still runs."""
        self._remove(container, force=False)

    def logs(self, container: str, tail: int = 200) -> bytes:
        return self._client.ask(f"read the log of {container}", lambda api: bytes(api.logs(container, tail=tail)))

    def interact(self, container: str, argv: Sequence[str], *, terminal: bool) -> int:
        """Raises NodeUnreachable, NodeUnfit."""
        return docker_exec.run(self.machine, container, argv, terminal=terminal)

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
        return shm_cleanup.sweep(self.machine, since)

    def reach(self, address: str, port: int, timeout: float, expect: str | None = None) -> Reach:
        return self.machine.reach(address, port, timeout, expect)

    def sh(self, script: str, *arguments: str, timeout: float = 60) -> bytes:
        return run_script(self.machine, script, *arguments, timeout=timeout).out

    def host_key(self) -> str | None:
        return self.machine.host_key()

    def ssh_port(self) -> int | None:
        return self.machine.ssh_port()

    def close(self) -> None:
        self._client.close()

    def _engine_answers(self, images: Sequence[str]) -> tuple[_Answer, Sequence[str]]:
        present = [image.id for image in found(self._images.inspect, images)]

        def ask(api: APIClient) -> _Answer:
            info = api.info()
            self._identity = str(info.get("ID", "")), str(info.get("ServerVersion", ""))
            return info

        return self._client.ask("ask the engine what it is", ask), present

    def _look(self, container: str) -> ContainerState | None:
        def ask(api: APIClient) -> ContainerState | None:
            try:
                return container_state(api.inspect_container(container))
            except NotFound:
                return None

        return self._client.ask(f"inspect {container}", ask)

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
        def ask(api: APIClient) -> None:
            try:
                api.remove_container(container, v=True, force=force)
            except NotFound:
                return
            except APIError as refusal:
                if refusal.status_code != HTTPStatus.CONFLICT or "already in progress" not in str(refusal.explanation):
                    raise
                with contextlib.suppress(NotFound):  # gone before we could wait for it
                    api.wait(container, timeout=_REMOVAL_TIMEOUT, condition="removed")

        self._client.ask(f"remove {container}", ask)


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
