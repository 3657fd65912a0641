"""Container of a node: its mounts, limits, variables and labels, from the job and the facts about the node.

node: these facts; entry: the node as the job file has it.
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
from collections.abc import Mapping
from typing import Any

from launcher import __version__
from launcher.job.models import Job
from launcher.job.parts import DockerOptions, NodeEntry
from launcher.model import caches, labels
from launcher.model.checked import OUTPUT_ROOT
from launcher.model.container import CODE, KIT, WORKDIR, ContainerSpec, Layout, Mount
from launcher.model.facts import NodeFacts, login_of
from launcher.model.plan import Membership, Plan, RunId
from launcher.planning import command, gpus
from launcher.planning.command import Context

BREAKPOINT = "launcher_breakpoint"  # module of container_scripts
INFINIBAND = "/dev/infiniband"
# If a job sets none of these, NCCL writes how it starts to a file of each process, from which run.end.gradients says
# how the gradients travel. ENV has the settings that it found, also the image's: why it may use no RDMA device.
NCCL_LOG = {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"}
FOR_THE_HOST = 8 << 30  # bytes of a memory that CPU and GPU share: a machine whose memory is full hangs


def output_dir(home: str, run: RunId) -> str:
    """Return the run's output folder on a node, the same for both runtimes."""
    return posixpath.join(home, OUTPUT_ROOT, run)


def workdir(output: str, node: str) -> str:
    """Return a node's working directory in the run's output folder."""
    return posixpath.join(output, WORKDIR, node)


def assumed_data(job: Job, home: str) -> tuple[Mount, ...]:
    """Return mounts of the job's data for an offline plan; `up` names the copies by their content."""
    root = posixpath.join(home, OUTPUT_ROOT, "data", "copies")
    return tuple(Mount(posixpath.join(root, data.name), data.at, read_only=True) for data in job.data)


def layout(job: Job, node: NodeFacts, run: RunId) -> Layout:
    """Return the fixed paths inside a container; for plain processes, folders below the run's output folder."""
    if job.traits.isolates:
        return Layout(code=CODE, output=job.output, kit=KIT)
    output = output_dir(node.home, run)
    kit = posixpath.join(output, ".node", node.name, "kit")
    return Layout(code=workdir(output, node.name), output=output, kit=kit)


def container(
    context: Context, entry: NodeEntry, node: NodeFacts, rank: int, uuids: tuple[str, ...], ranks: range
) -> ContainerSpec:
    """Return the container of the node with this rank. uuids: its GPUs. ranks: global ranks of its workers."""
    job, traits = context.job, context.job.traits
    paths = layout(job, node, context.run)
    user, groups = login_of(node) if traits.isolates else ("", ())
    gpu_driver = gpus.driver(node, uuids) if uuids and traits.isolates else ""
    devices = ((INFINIBAND,) if node.infiniband and traits.isolates else ()) + job.docker.devices
    if gpu_driver == "nvidia":
        named = {text.partition(":")[0] for text in devices}
        devices += tuple(file for file in gpus.device_files(node, uuids) if file not in named)
    spec = ContainerSpec(
        name=f"launcher-{context.run}-{rank}",
        image=node.image or context.image.id,
        argv=command.argv(context, paths, rank, len(ranks)),
        env=_environment(context, entry, node, rank, uuids, len(ranks), paths.output),
        layout=paths,
        output_dir=output_dir(node.home, context.run),
        workdir=workdir(output_dir(node.home, context.run), node.name),
        output_root="" if node.output_root == posixpath.join(node.home, OUTPUT_ROOT) else node.output_root,
        user=user,
        groups=groups,
        caches=_caches(context, node) if traits.isolates else (),
        mounts=(*(mount.with_home(node.home) for mount in job.mounts), *node.data) if traits.isolates else (),
        gpus=uuids,
        gpu_driver=gpu_driver,
        userns="host" if traits.isolates and node.engine is not None and node.engine.remapped else "",
        ulimits=node.ulimits,
        docker={**_docker(job.docker), "devices": devices},
        shm_size=job.resources.shm if job.docker.ipc != "host" else None,
        memory=job.resources.memory or unified_memory_limit(node, uuids),
        cpus=job.resources.cpus,
        restarts=job.restarts,
    )
    hosts = [machine.host for machine in job.machines]
    return labelled(spec, context, node=entry.name, host=entry.host, uid=node.uid, rank=rank, ranks=ranks, hosts=hosts)


def _docker(options: DockerOptions) -> dict[str, Any]:
    """Return the keys of `docker`, without those that were left at an empty default: a new key changes no plan."""
    default = DockerOptions()
    return {key: value for key, value in options if value or value != getattr(default, key)}


def unified_memory_limit(node: NodeFacts, uuids: tuple[str, ...]) -> int | None:
    """Return the default memory limit of a container whose GPU shares the machine's memory; None for other GPUs."""
    if not any(gpu.shared for gpu in node.gpus if gpu.uuid in uuids) or node.memory < 2 * FOR_THE_HOST:
        return None
    return node.memory - FOR_THE_HOST


def _caches(context: Context, node: NodeFacts) -> tuple[Mount, ...]:
    """Return the folders of code compiled at run time and of models, at which environment.sh points the libraries."""
    wanted = {}
    if context.job.cache:
        wanted["cache"] = caches.name(node.image or context.image.id, node.machine)
    if context.job.models:
        wanted[caches.MODELS] = caches.MODELS
    root = posixpath.join(node.home, OUTPUT_ROOT, caches.FOLDER)
    return tuple(Mount(posixpath.join(root, name), f"{KIT}/{at}") for at, name in wanted.items())


def _proxies(job: Job, node: NodeFacts, own: Mapping[str, str]) -> dict[str, str]:
    """Return the node's proxies as `docker run` passes them, in both cases; not those that the job sets itself, nor
    those with a password, which would be in the plan (`unpassed_proxies`).
    """
    given = {name.upper() for name in (*own, *(secret.name for secret in job.secrets))}
    known = [(name, value) for name, value in node.proxies if name not in given and not _has_password(value)]
    return {each: value for name, value in known for each in (name, name.lower())}


def unpassed_proxies(job: Job, node: NodeFacts) -> list[str]:
    """Return the node's proxies with a password, which are not passed to the containers."""
    given = {secret.name.upper() for secret in job.secrets} | {name.upper() for name in job.env}
    return [name for name, value in node.proxies if _has_password(value) and name not in given]


def _has_password(proxy: str) -> bool:
    return "@" in proxy.rpartition("://")[2].partition("/")[0]


def _known_nodes(context: Context, processes: int) -> dict[str, str]:
    """Return what a node of a job with min_nodes must know of the others, for elastic/container_scripts/elastic.py."""
    job, rendezvous = context.job, context.rendezvous
    addresses = {  # nodes on one machine have a port each
        entry.name: f"{address}:{rendezvous.port + (rank if job.traits.one_machine else 0)}"
        for rank, (entry, address) in enumerate(zip(job.machines, rendezvous.addresses, strict=True))
    }
    known = {
        "order": [entry.name for entry in job.machines],
        "size": len(job.nodes),
        "least": job.min_nodes,
        "lost_after": job.lost_after,
        "processes": processes,
        "addresses": addresses,
    }
    return {"LAUNCHER_MEETING": json.dumps(known), "LAUNCHER_MIN_NODES": str(job.min_nodes)}


def _environment(
    context: Context, entry: NodeEntry, node: NodeFacts, rank: int, uuids: tuple[str, ...], processes: int, output: str
) -> dict[str, str]:
    """Return the launcher's variables, overridden by the job's, overridden by the node's."""
    job, rendezvous = context.job, context.rendezvous
    interface = rendezvous.interfaces[rank]
    env = {
        "LAUNCHER_RUN": context.run,
        "LAUNCHER_NODE": entry.name,
        "LAUNCHER_NODE_RANK": str(rank),
        "LAUNCHER_OUTPUT": output,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # on a bus error or abort, print the stack of every thread
        "PYTHONBREAKPOINT": f"{BREAKPOINT}.{'wait' if context.watched else 'skip'}",
        "TORCHELASTIC_ERROR_FILE": posixpath.join(output, "errors", f"{entry.name}.json"),
        **command.SAVING,
        "NCCL_DEBUG": "WARN",
        "NCCL_SOCKET_IFNAME": f"={interface}",  # "=": NCCL takes a bare name as a prefix
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
    }
    own = job.env_of(entry)
    env |= _proxies(job, node, own) if job.traits.isolates else {}
    if uuids and len({machine.host for machine in job.machines}) > 1 and not NCCL_LOG & own.keys():
        log = posixpath.join(output, "logs", f"{entry.name}.nccl.%p")
        env |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET", "NCCL_DEBUG_FILE": log}
    env |= {setting.name: setting.value for setting in context.network[rank]} if context.network else {}
    if not uuids:
        sharing = sum(other.host == entry.host for other in job.machines)  # nodes of the job on this machine
        env["OMP_NUM_THREADS"] = str(max(1, node.cpus // (processes * sharing)))
    if not job.traits.isolates and node.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
    if any(map(gpus.is_instance, uuids)):  # rank.sh gives each worker one: CUDA uses only one instance per process
        env["LAUNCHER_MIG"] = ",".join(uuids[worker % len(uuids)] for worker in range(processes))
    if job.timeout is not None:
        env["LAUNCHER_TIMEOUT"] = str(job.timeout)
    if job.budget is not None:
        env["LAUNCHER_BUDGET"] = str(job.budget)
    if job.hang_timeout is not None and (rank == 0 or job.min_nodes):  # rank 0's output and steps are signs of life
        env["LAUNCHER_HANG_TIMEOUT"] = str(job.hang_timeout)
    if job.min_nodes is not None:
        env |= _known_nodes(context, processes)
    elif job.run.command is not None:
        env |= command.variables_without_torchrun(rendezvous.address, rendezvous.port, nodes=len(job.nodes), rank=rank)
    return env | own


def labelled(
    spec: ContainerSpec, context: Context, *, node: str, host: str, uid: int, rank: int, ranks: range, hosts: list[str]
) -> ContainerSpec:
    """Return the container with its labels. uid: of the ssh user on the node. hosts: of all nodes, by rank."""
    values = {
        labels.RUN: context.run,
        labels.JOB: context.job.name,
        labels.NODE: node,
        labels.HOST: host,
        labels.NODE_RANK: str(rank),
        labels.RANKS: f"{ranks.start}+{len(ranks)}",
        labels.NODES: labels.SPLIT.join(hosts),
        labels.CODE: context.code,
        labels.GPUS: labels.SPLIT.join(spec.gpus),
        labels.OUTPUT: spec.output_dir,
        labels.UID: str(uid),
        labels.OWNER: context.owner,
        labels.CREATED: str(context.created),
        labels.VERSION: __version__,
        labels.RUNTIME: context.job.runtime,
        labels.PURPOSE: "run",
    }
    if context.job.min_nodes is not None:
        values[labels.MIN_NODES] = str(context.job.min_nodes)
        values[labels.SPARES] = str(len(context.job.spares or ()))
    return dataclasses.replace(spec, labels=values)


def in_group(plan: Plan, group: Membership) -> Plan:
    """Return the plan of a run of a sweep, with the labels that say so on every node."""
    own = labels.of_group(group)
    specs = [dataclasses.replace(node.container, labels={**node.container.labels, **own}) for node in plan.nodes]
    nodes = (dataclasses.replace(node, container=spec) for node, spec in zip(plan.nodes, specs, strict=True))
    return dataclasses.replace(plan, nodes=tuple(nodes))
