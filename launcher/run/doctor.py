"""Checks of nodes before a run: each node on its own, then the connections between them. Leaves nothing behind."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TypeAlias

from launcher import errors, features
from launcher.errors import LauncherError, NodesFailed, NodeUnfit, PlanInvalid
from launcher.image import cuda
from launcher.image.cuda import explaining_refused_cuda
from launcher.image.ensure import whereabouts
from launcher.image.image_locations import ImageLocations, image_store
from launcher.image.lock import lock_path
from launcher.image.probe import ANY_CONTAINER, image_facts
from launcher.job.models import Job
from launcher.job.overrides import on_nodes
from launcher.job.parts import Image, NodeEntry
from launcher.model import labels
from launcher.model.facts import ImageInfo, NodeFacts, Probe, Reach
from launcher.model.plan import Rendezvous
from launcher.node import output_folder
from launcher.node.connect import Fleet, caller_engine
from launcher.node.engine import Engine
from launcher.node.parallel import run_all_catching
from launcher.planning import checks, gpu_checks, gpus, ports, rdma
from launcher.planning.checks import Check, Level
from launcher.planning.command import require_torch
from launcher.planning.rendezvous import choose, is_tunnel
from launcher.records.trainer import decoder_source
from launcher.run.begin.claims import with_claims
from launcher.run.begin.prepare import inspect_image, preview
from launcher.run.begin.reachability import TIMEOUT, probe_master, reach_node

JobCheck: TypeAlias = Callable[[Job, Sequence[Engine]], Iterator[Check]]  # of a feature
_NAMES: dict[type[LauncherError], str] = {
    errors.HostKeyUnknown: "host key",
    errors.HostKeyChanged: "host key",
    errors.AuthFailed: "login",
    errors.EngineForbidden: "engine rights",
    errors.EngineUnavailable: "engine",
    errors.NodeUnfit: "login shell",
}
DATA_TIMEOUT = 120.0
SAMPLE = 16  # files of a data set that are read completely on every node

_PEERS = "if command -v timeout >/dev/null; then timeout 20 nvidia-smi topo -p2p r; else nvidia-smi topo -p2p r; fi"
_EPHEMERAL = "cat /proc/sys/net/ipv4/ip_local_port_range"  # a narrower one may be all that a firewall opens
# $1: a mount's source
_AT_HOME = 'case $1 in "~"|"~/"*) rest=${1#"~"}; shift; set -- "$HOME$rest" "$@" ;; esac'
_READABLE = (
    f"{_AT_HOME}\n"
    + """
if [ ! -e "$1" ]; then echo missing; elif ls -- "$1" >/dev/null 2>&1 && [ -r "$1" ]; then echo ok; fi
"""
)
# $1: a folder or file, $2: number of its files to read. Prints `<files> <digest of names and sizes> <of the sample>`,
# or `missing`.
_DATA = (
    f"{_AT_HOME}\n"
    + """
LC_ALL=C; export LC_ALL
digest() { sha256sum | cut -c1-12; }
[ -e "$1" ] || { echo missing; exit; }
if [ ! -d "$1" ]; then echo "1 $(digest <"$1")"; exit; fi
cd -- "$1" || exit
listed() {
  find . -type f -printf '%P %s\\n' 2>/dev/null || find . -type f -exec stat -c '%n %s' {} + | sed 's|^[.]/||'
}
count=$(listed | wc -l | tr -d ' ')
[ "$count" -gt 0 ] || { echo "0 empty"; exit; }
step=$(((count + $2 - 1) / $2))
sample=$(listed | sort | awk -v step="$step" 'NR % step == 1 || step == 1' | sed 's/ [0-9]*$//' |
  while IFS= read -r file; do cat -- "$file"; done | digest)
echo "$count $(listed | sort | digest) $sample"
"""
)


def check_nodes(job: Job | None, fleet: Fleet) -> Iterator[Check | NodeFacts]:
    """Yield all checks of the nodes, in the order of their dependencies, and the facts of nodes with GPUs.

    fleet: connected with failures allowed; the failed nodes are reported first. job: None checks for any job.
    """
    failed = False
    for check in _facts_and_network(job, fleet):
        failed = failed or (isinstance(check, Check) and check.level is Level.FAIL)
        yield check
    if job is not None and job.traits.has_limits and not failed:
        yield from _containers(job, fleet)


def _facts_and_network(job: Job | None, fleet: Fleet) -> Iterator[Check | NodeFacts]:
    for name, error in fleet.failed.items():
        kind = next((label for of, label in _NAMES.items() if isinstance(error, of)), "reachable")
        yield Check(name, kind, Level.FAIL, error.what, error.next_step)
    seen = run_all_catching([partial(with_claims, engine, port=job is not None) for engine in fleet.engines])
    most = run_all_catching([engine.machine.most_sessions for engine in fleet.engines])
    usable: list[tuple[Engine, NodeFacts]] = []
    need_gpus: list[NodeFacts] = []
    for engine, node, sessions in zip(fleet.engines, seen, most, strict=True):
        if isinstance(node, LauncherError):
            yield Check(engine.node, "facts", Level.FAIL, node.what, node.next_step)
            continue
        usable.append((engine, node))
        how = "this machine" if engine.host == "local" else f"{node.user}@{node.hostname}, host key is known"
        what = f"{how}; {node.cpus} CPUs, {node.memory / (1 << 30):.0f} GiB"
        yield Check(engine.node, "reachable", Level.OK, what)
        if isinstance(sessions, int):  # everything works, but opens further connections, which takes time
            what = f"its sshd allows {sessions} concurrent sessions per connection, fewer than a run needs"
            fix = "set MaxSessions to 10, its default, in sshd_config"
            yield Check(engine.node, "ssh sessions", Level.WARN, what, fix)
        entry = next((e for e in job.machines if e.name == engine.node), None) if job else None
        wanted = "all" if job is None or entry is None else job.gpus_of(entry)
        yield from checks.of_node(node, job)
        yield from gpu_checks.of_node(node, wanted, isolated=job is None or job.traits.isolates)
        if wanted != "none":
            need_gpus.append(node)
        if node.gpus:
            yield node
    facts = [node for _, node in usable]
    yield from _peers(usable)
    if job is not None:
        yield from _mounts(job, [engine for engine, _ in usable])
        if job.traits.has_images and job.image is not None and usable:
            with caller_engine() as local:
                lock = lock_path(job.file) if job.file else None
                locations = ImageLocations([engine for engine, _ in usable], local, lambda _: None)
                yield _found(job.image, locations, lock)
        yield from _image(job, usable)
        if not job.traits.has_images:
            yield from _python(job, [engine for engine, _ in usable])
    if len(facts) > 1:
        yield from checks.alike(facts)
        yield from gpu_checks.alike(need_gpus, job=job is not None and job.each is None)
        yield from rdma.between(need_gpus)
    if job is not None and facts and not fleet.failed and len(facts) == len(job.machines):
        yield ports.check(job, facts)
        yield from _decoder(job, fleet, facts)
        if not job.traits.one_machine and len(facts) > 1:
            yield from _between(job, fleet, facts)
        yield from _same_data(job, fleet)
    for feature in features.FEATURES.values() if job is not None else ():
        for key in feature.checks:
            if job is not None and getattr(job, key):
                check: JobCheck = features.load(feature.checks[key])
                yield from check(job, [engine for engine, _ in usable])


def _peers(usable: Sequence[tuple[Engine, NodeFacts]]) -> Iterator[Check]:
    several = [engine for engine, node in usable if sum(not gpu.mig for gpu in node.gpus) > 1]
    for engine, printed in zip(several, _everywhere(several, _PEERS), strict=True):
        if (check := gpu_checks.peers(engine.node, printed)) is not None:
            yield check


def _found(image: Image, locations: ImageLocations, lock: Path | None) -> Check:
    """Check that the job's image exists: on a node, on this machine, or in a registry."""
    try:
        return Check("all", "image", Level.OK, whereabouts(image, locations, lock))
    except LauncherError as error:
        what = str(error.errors[0]) if isinstance(error, NodesFailed) else f"{error.where} {error.what}"
        return Check("all", "image", Level.FAIL, what, error.next_step)


def _decoder(job: Job, fleet: Fleet, facts: Sequence[NodeFacts]) -> Iterator[Check]:
    """Check which decoder the trainer will use, if the job runs it."""
    if not decoder_source(job):
        return
    try:
        check = checks.decoder(job, inspect_image(job, fleet, facts)[0])
    except LauncherError as error:
        check = Check("all", "decoder", Level.WARN, f"not known: {error.where}: {error.what}", error.next_step)
    if check is not None:
        yield check


def _image(job: Job, usable: Sequence[tuple[Engine, NodeFacts]]) -> Iterator[Check]:
    """Check the nodes' drivers and GPUs against the image's CUDA, if known without a container. For plain processes:
    against torch's CUDA version."""
    wanted = {entry.name: job.gpus_of(entry) for entry in job.machines}
    used = [(engine, gpus.only_used(node, wanted[engine.node])) for engine, node in usable if engine.node in wanted]
    users = [(engine, node) for engine, node in used if node.gpus]
    if not users:
        return
    name, version, torch = "", "", ""
    if job.traits.has_images and job.image is not None:
        name = job.image.base or job.image.ref or ""
        seen = run_all_catching([partial(image_store(engine).inspect, name) for engine, _ in users])
        own = (info.cuda for info in seen if isinstance(info, ImageInfo) and info.cuda)
        version = next(own, "") or cuda.of_name(name)
    elif job.run.command is None:
        python = image_facts(users[0][0], "", None, ANY_CONTAINER)
        version, torch = python.cuda, python.torch
    for _, node in users:
        found = cuda.verdict(node, version, name, torch)
        if version or found.what:
            level = Level.FAIL if not found.runs else Level.WARN if found.what else Level.OK
            what = found.what or f"driver {node.nvidia.driver} supports CUDA {version} of {cuda.subject(node, name)}"
            yield Check(node.name, "image", level, what, found.fix)


def _python(job: Job, engines: Sequence[Engine]) -> Iterator[Check]:
    """Check that the Python of plain processes has what the job's program needs of torch."""
    if job.run.command is not None or not engines:
        return
    found = image_facts(engines[0], "", None, replace(ANY_CONTAINER, env=job.env_of(job.nodes[0])))
    try:
        require_torch(job, found)
    except PlanInvalid as error:
        yield Check("all", "torch", Level.FAIL, f"{error.where} {error.what}", error.next_step)
    else:
        yield Check("all", "torch", Level.OK, f"{found.python} has torch {found.torch}")


def _mounts(job: Job, engines: Sequence[Engine]) -> Iterator[Check]:
    for mount in job.mounts if job.traits.isolates else ():
        path = mount.source
        for engine, found in zip(engines, _everywhere(engines, _READABLE, path), strict=True):
            level, what, fix = Level.FAIL, f"{path} is not readable by the ssh user", ""
            if found.strip() == "ok":
                level, what = Level.OK, f"{path} is readable"
            elif found.strip() == "missing":
                what, fix = f"{path} does not exist", "create it, or change `mounts`"
            else:
                fix = f"check its owner and mode: {engine.machine.typed(shlex.join(['ls', '-ld', path]))}"
            yield Check(engine.node, "mount", level, what, fix)


def _between(job: Job, fleet: Fleet, facts: Sequence[NodeFacts]) -> Iterator[Check]:
    """Test connections between the nodes, at the addresses and interfaces that a run would use."""
    addresses = [entry.address for entry in job.machines]
    port = next((port for port in job.ports if not ports.in_use(job, facts, port)), job.port)
    try:
        probes = probe_master(fleet, facts, port, addresses[0])
    except LauncherError as error:
        yield Check("all", "network", Level.FAIL, str(error))
        return
    try:
        meeting = choose(facts, probes, port, addresses)
    except NodeUnfit as error:
        # A probe that reached another machine (docker0 has the same address on every node) proves nothing.
        yield from map(_connection, [probe for probe in probes if probe.reach is not Reach.OTHER] or probes)
        yield Check(facts[0].name, "rendezvous", Level.FAIL, error.what, error.next_step)
        return
    yield from map(_connection, [probe for probe in probes if probe.address == meeting.address])
    yield from _interfaces(fleet, facts, meeting)
    yield from _ring(fleet, facts, meeting)
    yield from _high_ports(fleet, facts, meeting)


def _connection(probe: Probe) -> Check:
    target = f"{probe.target} at {probe.address}:{probe.port}"
    level, what, fix = Level.FAIL, f"no answer from {target}", ""
    if probe.reach.reached:
        level, what = Level.OK, f"{target} is reachable"
    elif probe.reach is Reach.UNKNOWN:
        level, what = Level.WARN, f"could not test the connection to {target}: bash or timeout is missing on the node"
        fix = "install bash and coreutils on the node"
    elif probe.reach is Reach.OTHER:
        what = f"another machine answers instead of {target}"
        fix = f"set {probe.target}'s address in the job file: nodes: [{{host: ..., address: ...}}]"
    else:
        fix = f"open TCP {probe.port} and the ephemeral ports between the nodes: firewall, security group, routing"
    return Check(probe.source, "network", level, what, fix)


def _interfaces(fleet: Fleet, facts: Sequence[NodeFacts], meeting: Rendezvous) -> Iterator[Check]:
    """Report the interfaces for NCCL_SOCKET_IFNAME etc. and check that all have the same MTU."""
    named = list(zip(fleet.engines, meeting.interfaces, strict=True))
    sizes = [
        next((str(each.mtu) for each in node.interfaces if each.name == name and each.mtu), "unknown")
        for (_, name), node in zip(named, facts, strict=True)
    ]
    for (engine, name), address, mtu, node in zip(named, meeting.addresses, sizes, facts, strict=True):
        what = f"{name} with {address}, MTU {mtu}" + (", InfiniBand" if node.infiniband else "")
        if is_tunnel(name):
            fix = "if the nodes share another network, set their addresses in it: nodes: [{host: ..., address: ...}]"
            yield Check(
                engine.node, "interface", Level.WARN, f"{what}: a tunnel, slower than the network below it", fix
            )
        else:
            yield Check(engine.node, "interface", Level.OK, what)
    if len(set(sizes)) > 1:
        fix = "set the same MTU on all nodes and the switch: sudo ip link set dev IFACE mtu N"
        yield Check("all", "mtu", Level.WARN, f"differs between nodes: {', '.join(sizes)}", fix)


def _ring(fleet: Fleet, facts: Sequence[NodeFacts], meeting: Rendezvous) -> Iterator[Check]:
    """Test the ring: every node connects to the next one's address, as NCCL and gloo do."""

    def try_next(rank: int) -> Probe:
        engine, after = fleet.engines[rank], (rank + 1) % len(facts)
        target = fleet.engines[after]
        address, port = meeting.addresses[after], facts[after].ssh_port
        reach = reach_node(engine.machine, target.machine, address, port, port)
        return Probe(engine.node, target.node, address, port, reach)

    for probe in run_all_catching([partial(try_next, rank) for rank in range(len(facts))]):
        if isinstance(probe, LauncherError):
            yield Check(probe.where, "network", Level.FAIL, probe.what, probe.next_step)
        elif probe.target != facts[0].name:  # the first node was tested above
            yield _connection(probe)


def _high_ports(fleet: Fleet, facts: Sequence[NodeFacts], meeting: Rendezvous) -> Iterator[Check]:
    """Try a port of each neighbour in the ring, both ways, as gloo and NCCL listen on ports that the kernel chooses.

    Nothing listens there: a port that is refused is open, and only a firewall drops the attempt.
    """
    ranges = _everywhere(fleet.engines, _EPHEMERAL)
    ports = [high_port(text, node.listening) for text, node in zip(ranges, facts, strict=True)]
    count = len(facts)
    pairs = sorted({(rank, (rank + way) % count) for rank in range(count) for way in (1, -1)})

    def connect(source: int, target: int) -> Probe:
        address, port = meeting.addresses[target], ports[target]
        reach = fleet.engines[source].machine.reach(address, port, TIMEOUT)
        return Probe(facts[source].name, facts[target].name, address, port, reach)

    seen = run_all_catching([partial(connect, source, target) for source, target in pairs])
    for probe in seen:
        if isinstance(probe, LauncherError):
            yield Check(probe.where, "network", Level.FAIL, probe.what, probe.next_step)
        elif probe.reach is Reach.SILENT:
            yield _connection(probe)


def high_port(text: str, listening: Sequence[int]) -> int:
    """Return the highest ephemeral port on which nothing listens. text: of ip_local_port_range; "": the default."""
    numbers = [int(word) for word in text.split() if re.fullmatch(r"[0-9]{1,5}", word, re.ASCII)]
    least, most = numbers if len(numbers) == 2 and 0 < numbers[0] <= numbers[1] < 65536 else (32768, 60999)
    return next((port for port in range(most, least, -1) if port not in listening), least)


def _containers(job: Job, fleet: Fleet) -> Iterator[Check]:
    """Create, start and remove each node's container, with `true` as its program: what an engine refuses is found.

    Each is planned as that of a run on one node, as the machines of a pool differ. The job's image is neither pulled
    nor built: a node that lacks it (its base, if it is built) is not tried.
    """
    name = (job.image.ref or job.image.base or "") if job.image else ""
    alone = {"min_nodes": None, "spares": None}

    def attempt(entry: NodeEntry) -> Check:
        only = fleet.only([entry.name])
        engine = only.engines[0]
        if image_store(engine).inspect(name) is None:
            return Check(engine.node, "container", Level.OK, f"not tried: image {name} is not on the node yet")
        plan = preview(on_nodes(job, [entry]).model_copy(update=alone), only, code="")
        planned = plan.master.container
        targets = {mount.target for mount in job.mounts}
        mounts = tuple(mount for mount in planned.mounts if mount.target in targets)  # the job's data has no copy yet
        probe, marks = f"launcher-probe-{token_hex(6)}", {labels.PURPOSE: "probe"}
        spec = replace(planned, name=probe, image=name, argv=("true",), labels=marks, mounts=mounts, restarts=0)
        spec = replace(spec, caches=())  # nothing is made for it but the output folder
        output_folder.make(engine.files, spec.output_dir, plan.run, spec.workdir, "probe")
        try:
            with explaining_refused_cuda(engine, name):
                engine.run_probe(spec)
        finally:
            output_folder.remove(engine.files, spec.output_dir, plan.run)
        return Check(engine.node, "container", Level.OK, "the engine starts the planned container")

    seen = run_all_catching([partial(attempt, entry) for entry in job.machines])
    for entry, check in zip(job.machines, seen, strict=True):
        if isinstance(check, LauncherError):
            error = check.errors[0] if isinstance(check, NodesFailed) else check
            fix = error.next_step or "change the job's `docker`, `mounts` or `resources`, or the engine's settings"
            what = error.what if error.is_of(entry.name) else f"{error.where} {error.what}"
            yield Check(entry.name, "container", Level.FAIL, what, fix)
        else:
            yield check


def _same_data(job: Job, fleet: Fleet) -> Iterator[Check]:
    """Check that read-only mounts have the same names, sizes and a sample of contents on every node."""
    for mount in job.mounts if len(fleet.engines) > 1 and job.traits.isolates else ():
        if not mount.read_only:
            continue
        seen = _everywhere(fleet.engines, _DATA, mount.source, str(SAMPLE), timeout=DATA_TIMEOUT)
        if {found.strip() for found in seen} == {"missing"}:
            continue  # reported by _mounts
        if len(set(seen)) == 1 and seen[0].strip():
            count = seen[0].split()[0]
            yield Check("all", "data", Level.OK, f"{mount.source}: the same {count} files on every node")
        else:
            each = zip([engine.node for engine in fleet.engines], seen, strict=True)
            what = "; ".join(f"{node}: {found.strip() or 'not read'}" for node, found in each)
            here = shlex.quote(f"{mount.source}/")
            fix = f"synchronize it: rsync -a --checksum {here} OTHER:{here}"
            yield Check("all", "data", Level.WARN, f"{mount.source} differs between nodes ({what})", fix)


def _everywhere(engines: Sequence[Engine], script: str, *arguments: str, timeout: float = 60) -> list[str]:
    """Run a script on all nodes concurrently; return its output per node, "" if it failed."""
    found = run_all_catching(
        [partial(engine.machine.script, script, *arguments, timeout=timeout) for engine in engines]
    )
    return ["" if isinstance(each, LauncherError) else each.out.decode(errors="replace") for each in found]
