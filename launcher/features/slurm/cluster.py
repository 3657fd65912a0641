"""Text, plan and checks of a job on a Slurm cluster. The batch script is the first node's container."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from launcher.features.slurm import script
from launcher.features.slurm.queue import NODES, PLAIN, options_of
from launcher.job.models import Job
from launcher.job.overrides import expand_sweep
from launcher.job.settings import Cluster
from launcher.model import labels
from launcher.model.checked import OUTPUT_ROOT
from launcher.model.container import BatchSpec, Layout
from launcher.model.plan import NodePlan, Plan, Rendezvous, RunId
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.machine import Done, run_script, shell
from launcher.planning.checks import Check, Level
from launcher.planning.cluster import ClusterPlan, build
from launcher.planning.command import Context
from launcher.planning.containers import labelled, output_dir, workdir
from launcher.planning.offline import assumed_image
from launcher.run.cluster import Kind
from launcher.run.locate import caller

_PATIENCE = 20  # seconds to wait for a free machine


def plan(job: Job, cluster: Cluster, engine: Engine, code: str, run: RunId, sweep: Sequence[RunId]) -> Plan:
    """Return the plan of a run. engine: the cluster's. code: digest of the code archive. sweep: the runs of its sweep,
    which form one job array.

    Raises JobInvalid with every job key that the cluster does not support.
    """
    planned, batch = _planned(job, cluster)
    output = output_dir(cluster.workdir, run)
    code_folder = workdir(output, "node-0")  # all nodes use it, as they share a file system
    meeting = Rendezvous("", job.port, (), (), probed=False)
    context = Context(job, run, assumed_image(job), meeting, code, caller(), int(time.time()))
    spec = BatchSpec(
        name=f"launcher-{run}-0",
        image=planned.image,
        argv=(),
        layout=Layout(code=code_folder, output=output, kit=posixpath.join(output, NODES, "kit")),
        output_dir=output,
        workdir=code_folder,
        script=batch,
        sweep=tuple(sweep),
    )
    hosts = [labels.NO_HOST] * planned.nodes  # Slurm chooses the machines
    ranks, uid = range(planned.processes), engine.uid()
    first = labelled(spec, context, node="node-0", host=engine.host, uid=uid, rank=0, ranks=ranks, hosts=hosts)
    other = replace(spec, script="", sweep=())  # part of the same Slurm job
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


def check(job: Job, cluster: Cluster, fleet: Fleet) -> Iterator[Check]:
    """Check that the cluster responds and that Slurm accepts the job. Raises JobInvalid as `plan` does."""
    for name, error in fleet.failed.items():
        yield Check(name, "slurm", Level.FAIL, error.what, error.next_step)
    for engine in fleet.engines:
        yield Check(engine.node, "slurm", Level.OK, engine.sh("sinfo --version").decode(errors="replace").strip())
        made = run_script(engine.machine, 'mkdir -p "$1" && [ -w "$1" ]', posixpath.join(cluster.workdir, OUTPUT_ROOT))
        fix = "set workdir of the cluster, in the settings file, to a writable folder"
        yield _check(engine.node, "workdir", made, f"{cluster.workdir} is writable", fix)
        planned, batch = _planned(expand_sweep(job)[0], cluster)  # variants differ only in the program's arguments
        test = shell(f'{PLAIN}exec sbatch "$@" --test-only', *options_of(batch))
        accepted = engine.machine.run(test, batch.encode())
        fix = "fix partition, account, qos, time or options of the cluster in the settings file, or the job"
        yield _check(engine.node, "sbatch", accepted, accepted.message.removeprefix("sbatch: "), fix)
        if accepted.code == 0:
            yield from _try_on_a_node(engine, planned, cluster)


def _try_on_a_node(engine: Engine, planned: ClusterPlan, cluster: Cluster) -> Iterator[Check]:
    """Check the job's requirements on one machine of the cluster, if one is free now."""
    what, argv, fix = "", [""], ""
    if not planned.image and planned.torchrun:
        what, argv = "python", [cluster.python, "-c", "import torch; print('torch', torch.__version__)"]
        fix = "set `python` or `setup` of the cluster in the settings file; how to create an environment: docs/slurm.md"
    elif planned.image and cluster.container == "pyxis":
        what, argv = "enroot", ["sh", "-c", 'v=$(enroot version) && echo "enroot $v" && [ "${v%%.*}" -ge 4 ]']
        fix = "images are imported by digest, which needs enroot 4.0 or newer (August 2025): ask the administrators"
    if not what:
        return
    asked = script.chosen(planned, cluster)
    chosen = [f"--{key}={value}" for key in ("partition", "account", "qos") if (value := getattr(asked, key))]
    options = [*chosen, "--quiet", "--nodes=1", "--ntasks=1", "--time=5", f"--immediate={_PATIENCE}", "--mpi=none"]
    tried = "\n".join([PLAIN, *asked.setup, 'exec srun "$@"'])
    done = engine.machine.run(["bash", "-c", tried, "launcher", *options, *argv], timeout=_PATIENCE + 120)
    if "Unable to allocate resources" in done.message:
        yield Check(
            engine.node, what, Level.WARN, f"skipped: no machine was free within {_PATIENCE} s", "try again later"
        )
    else:
        output = done.out.decode(errors="replace").strip()
        yield _check(engine.node, what, done, f"{argv[0]}: {output}" if what == "python" else output, fix)


def _check(node: str, name: str, done: Done, what: str, fix: str) -> Check:
    return Check(node, name, Level.FAIL, done.message, fix) if done.code else Check(node, name, Level.OK, what)


def text(job: Job, cluster: Cluster) -> tuple[str, Sequence[str]]:
    """Return the sbatch script that `up` submits, and warnings. Raises JobInvalid as `plan` does."""
    planned, batch = _planned(job, cluster)
    return batch, planned.warnings


def _planned(job: Job, cluster: Cluster) -> tuple[ClusterPlan, str]:
    script.check(job, cluster.container)
    planned = build(job, cluster.python, cluster.gpus)
    return planned, script.render(planned, cluster)


SLURM = Kind(plan, check, text)
