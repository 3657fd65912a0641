"""The plan of a run on a cluster: what `launcher export` prints is the container of the run's first node."""

from __future__ import annotations

import posixpath
import time
from dataclasses import replace

from launcher import __version__
from launcher.export import slurm
from launcher.job.models import Job
from launcher.model import labels
from launcher.model.container import ContainerSpec, Layout
from launcher.model.plan import NodePlan, Plan, Rendezvous, new_run_id
from launcher.node.engine import Engine
from launcher.node.slurm.engine import SlurmEngine
from launcher.node.slurm.queue import NODES
from launcher.plan.cluster import build
from launcher.plan.containers import digest, output_dir
from launcher.run.owner import caller


def plan_on(job: Job, engine: Engine, code: str) -> Plan:
    """code: digest of the code archive. Raises JobInvalid with every key that the cluster cannot carry."""
    if not isinstance(engine, SlurmEngine):
        raise TypeError(f"{engine.node} is no cluster")
    cluster, run = engine.cluster, new_run_id(job.name)
    slurm.check(job, cluster.container)
    planned = build(job, cluster.python, cluster.gpus)
    script = slurm.render(planned, cluster)
    output = output_dir(cluster.workdir, run)
    own = posixpath.join(output, NODES)
    marks = {
        labels.RUN: run,
        labels.JOB: job.name,
        labels.NODE: "node-0",
        labels.HOST: engine.host,
        labels.NODE_RANK: "0",
        labels.RANKS: f"0+{planned.processes}",
        labels.NODES: labels.SPLIT.join("-" * planned.nodes),  # which they are, Slurm decides
        labels.SPEC: digest(script),
        labels.CODE: code,
        labels.GPUS: "",
        labels.OUTPUT: output,
        labels.UID: str(engine.uid()),
        labels.OWNER: caller(),
        labels.CREATED: str(int(time.time())),
        labels.VERSION: __version__,
        labels.RUNTIME: job.runtime,
        labels.PURPOSE: "run",
    }
    first = ContainerSpec(
        name=f"launcher-{run}-0",
        image=planned.image,
        argv=("sbatch", script),
        labels=marks,
        layout=Layout(code=posixpath.join(own, "code"), output=output, kit=posixpath.join(own, "kit")),
        output_dir=output,
    )
    other = replace(first, argv=(), labels={})  # it is the same job
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
    meeting = Rendezvous("", planned.port, (), (), probed=False)
    return Plan(run, job.name, job.runtime, planned.image, "", code, meeting, nodes)
