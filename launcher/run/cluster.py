"""A job on a cluster: its plan, where what `launcher export` prints is the first node's container, and its checks."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from launcher.export import slurm
from launcher.job.models import Job
from launcher.job.overrides import expand_sweep
from launcher.job.settings import Cluster
from launcher.model import labels
from launcher.model.checked import OUTPUT_ROOT
from launcher.model.container import BatchSpec, Layout
from launcher.model.plan import NodePlan, Plan, Rendezvous, RunId
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.machine import Done, run_script
from launcher.node.slurm.queue import NODES
from launcher.planning.checks import Check, Level
from launcher.planning.cluster import ClusterPlan, build
from launcher.planning.command import Context
from launcher.planning.containers import labelled, output_dir
from launcher.planning.offline import assumed_image
from launcher.run.locate import caller

_PATIENCE = 20  # seconds for a machine to be free


def plan_on(job: Job, cluster: Cluster, engine: Engine, code: str, run: RunId, sweep: Sequence[RunId]) -> Plan:
    """engine: the cluster's. code: digest of the code archive. sweep: all runs of its sweep, which are one job array.

    Raises JobInvalid with every key that the cluster cannot carry.
    """
    planned, script = _script(job, cluster)
    output = output_dir(cluster.workdir, run)
    own = posixpath.join(output, NODES)
    meeting = Rendezvous("", job.port, (), (), probed=False)
    context = Context(job, run, assumed_image(job), meeting, code, caller(), int(time.time()))
    spec = BatchSpec(
        name=f"launcher-{run}-0",
        image=planned.image,
        argv=(),
        layout=Layout(code=posixpath.join(own, "code"), output=output, kit=posixpath.join(own, "kit")),
        output_dir=output,
        script=script,
        sweep=tuple(sweep),
    )
    hosts = [labels.NO_HOST] * planned.nodes  # which they are, Slurm decides
    ranks, uid = range(planned.processes), engine.uid()
    first = labelled(spec, context, node="node-0", host=engine.host, uid=uid, rank=0, ranks=ranks, hosts=hosts)
    other = replace(spec, script="", sweep=())  # it is the same job
    nodes = tuple(
        NodePlan(
            node=f"node-{rank}",
            host=engine.host,
            rank=rank,
            first_rank=rank * planned.processes,
            processes=planned.processes,
            container=first if rank == 0 else replace(other, name=f"launcher-{run}-{rank}"),
        )
        for rank in range(planned.nodes)
    )
    return Plan(run, job.name, job.runtime, planned.image, "", code, meeting, nodes, planned.warnings)


def examine_on(job: Job, cluster: Cluster, fleet: Fleet) -> Iterator[Check]:
    """Whether the cluster answers, and Slurm would take the job. Raises JobInvalid as plan_on does."""
    for name, error in fleet.failed.items():
        yield Check(name, "slurm", Level.FAIL, error.what, error.next_step)
    for engine in fleet.engines:
        yield Check(engine.node, "slurm", Level.OK, engine.sh("sinfo --version").decode(errors="replace").strip())
        made = run_script(engine.machine, 'mkdir -p "$1" && [ -w "$1" ]', posixpath.join(cluster.workdir, OUTPUT_ROOT))
        fix = "name a folder that you may write: workdir of the cluster, in the settings file"
        yield _check(engine.node, "workdir", made, f"{cluster.workdir} can be written", fix)
        planned, script = _script(expand_sweep(job)[0], cluster)  # variants differ in the program's arguments only
        taken = engine.machine.run(["sbatch", "--test-only"], script.encode())
        fix = "correct partition, account, qos, time or options of the cluster in the settings file, or the job"
        yield _check(engine.node, "sbatch", taken, taken.complaint.removeprefix("sbatch: "), fix)
        if taken.code == 0:
            yield from _try_on_a_node(engine, planned, cluster)


def _try_on_a_node(engine: Engine, planned: ClusterPlan, cluster: Cluster) -> Iterator[Check]:
    """What the job needs of a machine, tried on one of them, if one is free now."""
    what, argv, fix = "", [""], ""
    if not planned.image and planned.torchrun:
        what, argv = "python", [cluster.python, "-c", "import torch; print('torch', torch.__version__)"]
        fix = "set `python` of the cluster, or `setup`, in the settings file; how to make an environment: docs/slurm.md"
    elif planned.image and cluster.container == "pyxis":
        what, argv = "enroot", ["sh", "-c", 'v=$(enroot version) && echo "enroot $v" && [ "${v%%.*}" -ge 4 ]']
        fix = "images are imported by digest, which needs enroot 4.0 or newer (August 2025): ask the site for it"
    if not what:
        return
    asked = slurm.chosen(planned, cluster)
    chosen = [f"--{key}={value}" for key in ("partition", "account", "qos") if (value := getattr(asked, key))]
    options = [*chosen, "--quiet", "--nodes=1", "--ntasks=1", "--time=5", f"--immediate={_PATIENCE}", "--mpi=none"]
    script = "\n".join([*asked.setup, 'exec srun "$@"'])
    done = engine.machine.run(["bash", "-c", script, "launcher", *options, *argv], timeout=_PATIENCE + 120)
    if "Unable to allocate resources" in done.complaint:
        yield Check(
            engine.node, what, Level.WARN, f"not tried: no machine was free in {_PATIENCE} s", "try again later"
        )
    else:
        said = done.out.decode(errors="replace").strip()
        yield _check(engine.node, what, done, f"{argv[0]}: {said}" if what == "python" else said, fix)


def _check(node: str, name: str, done: Done, what: str, fix: str) -> Check:
    return Check(node, name, Level.FAIL, done.complaint, fix) if done.code else Check(node, name, Level.OK, what)


def _script(job: Job, cluster: Cluster) -> tuple[ClusterPlan, str]:
    slurm.check(job, cluster.container)
    planned = build(job, cluster.python, cluster.gpus)
    return planned, slurm.render(planned, cluster)
