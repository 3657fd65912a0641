"""Text, plan and checks of a job on a Slurm cluster. The batch script is the first node's container."""

from __future__ import annotations

import posixpath
import re
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from launcher.features.slurm import script
from launcher.features.slurm.engine import KILL_WAIT
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
from launcher.node.machine import Done
from launcher.planning.checks import Check, Level
from launcher.planning.cluster import ClusterPlan, build
from launcher.planning.command import Context
from launcher.planning.containers import labelled, output_dir, workdir
from launcher.planning.offline import assumed_image
from launcher.run.cluster import Kind
from launcher.run.end.stop import GRACE
from launcher.run.locate import caller

_PATIENCE = 20  # seconds to wait for a free machine
_MAKE_PROBE = 'mkdir -p "$1" && head -c 65536 /dev/zero >"$1/login"'  # $1: the folder
_WRITTEN, _UNSEEN = "written", "unseen"
# $1: that folder, then a program. Prints the machine's name, whether it could write there, and the program's output.
_TRY = f"""
echo "${{SLURMD_NODENAME:-$(hostname)}}"
[ -e "$1/login" ] || {{ echo {_UNSEEN}; exit 73; }}
why=$( (head -c 65536 /dev/zero >"$1/node") 2>&1) || {{ echo "$why" | tail -n 1; exit 73; }}
echo {_WRITTEN}
shift
[ $# -gt 0 ] || exit 0
SETUP
exec "$@"
"""
# Options of sbatch that srun does not have, or that do not matter for a step on one machine.
_OF_THE_BATCH = (
    *("--array", "--batch", "--begin", "--deadline", "--dependency", "--error", "--exclusive", "--export"),
    *("--export-file", "--get-user-env", "--hold", "--ignore-pbs", "--input", "--mem", "--mem-per-cpu"),
    *("--mem-per-gpu", "--no-requeue", "--nodes", "--ntasks", "--ntasks-per-node", "--open-mode", "--output"),
    *("--parsable", "--requeue", "--signal", "--test-only", "--time", "--time-min", "--wait", "--wrap"),
)


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
        probe = posixpath.join(cluster.workdir, OUTPUT_ROOT, f".doctor-{secrets.token_hex(8)}")
        try:
            yield from _check_one(job, cluster, engine, probe)
        finally:
            engine.machine.script('rm -rf -- "$1"', probe)


def _check_one(job: Job, cluster: Cluster, engine: Engine, probe: str) -> Iterator[Check]:
    """probe: a new folder in the cluster's, with which reading and writing are tried."""
    version = engine.machine.script("sinfo --version").out.decode(errors="replace").strip()
    yield Check(engine.node, "slurm", Level.OK, version)
    wait = engine.machine.script(PLAIN + KILL_WAIT).out.decode(errors="replace").strip()
    if wait.isdigit() and int(wait) < GRACE:
        what = (
            f"{wait} s (KillWait) to save a checkpoint after scancel or a preemption; launcher down gives {GRACE:g} s"
        )
        yield Check(engine.node, "time to save", Level.OK, what)
    made = engine.machine.script(_MAKE_PROBE, probe)
    fix = "set workdir of the cluster, in the settings file, to a writable folder with free space"
    yield _check(engine.node, "workdir", made, f"{cluster.workdir} is writable", fix)
    planned, batch = _planned(expand_sweep(job)[0], cluster)  # variants differ only in the program's arguments
    test = f'{PLAIN}exec sbatch "$@" --test-only'
    accepted = engine.machine.script(test, *options_of(batch), stdin=batch.encode())
    fix = "fix partition, account, qos, time or options of the cluster in the settings file, or the job"
    yield _check(engine.node, "sbatch", accepted, accepted.message.removeprefix("sbatch: "), fix)
    if made.code == 0 and accepted.code == 0:
        yield from _try_on_a_node(engine, planned, cluster, probe)


def _try_on_a_node(engine: Engine, planned: ClusterPlan, cluster: Cluster, probe: str) -> Iterator[Check]:
    """Check the shared folder and the job's requirements on one machine for such jobs, if one is free now."""
    what, argv, fix = "", list[str](), ""
    if not planned.image and planned.torchrun:
        what, argv = "python", [cluster.python, "-c", "import torch; print('torch', torch.__version__)"]
        fix = "set `python` or `setup` of the cluster in the settings file; how to create an environment: docs/slurm.md"
    elif planned.image and cluster.container == "pyxis":
        what, argv = "enroot", ["sh", "-c", 'v=$(enroot version) && echo "enroot $v" && [ "${v%%.*}" -ge 4 ]']
        fix = "images are imported by digest, which needs enroot 4.0 or newer (August 2025): ask the administrators"
    asked = script.chosen(planned, cluster)
    tried = _TRY.replace("SETUP", "\n".join(asked.setup))
    step = ["srun", *_of_its_kind(planned, asked), "bash", "-c", tried, "launcher", probe, *argv]
    done = engine.machine.script(f'{PLAIN}exec "$@"', *step, timeout=_PATIENCE + 120)
    machine, seen, *printed = [*done.out.decode(errors="replace").splitlines(), "", ""]
    if not machine:
        busy = "Unable to allocate resources" in done.message
        said = f"skipped: no machine was free within {_PATIENCE} s" if busy else done.message
        yield Check(engine.node, "node", Level.WARN if busy else Level.FAIL, said, "try again later")
    elif seen != _WRITTEN:
        why = f"{machine} does not see {cluster.workdir}" if seen == _UNSEEN else f"{machine} cannot write: {seen}"
        remedy = f"check its mounts and free space, or leave it out, with `options`: --exclude={machine}"
        yield Check(engine.node, "node", Level.FAIL, why, remedy)
    else:
        yield Check(engine.node, "node", Level.OK, f"{machine} writes to {cluster.workdir}")
        output = " ".join(printed).strip()
        if what:
            yield _check(engine.node, what, done, f"{argv[0]}: {output}" if what == "python" else output, fix)


def _of_its_kind(planned: ClusterPlan, asked: Cluster) -> list[str]:
    """Return the options of srun for one processor of a machine on which the job may run."""
    chosen = [f"--{key}={value}" for key in ("partition", "account", "qos") if (value := getattr(asked, key))]
    given = [option for option in asked.options if script.name_of(option) not in _OF_THE_BATCH]
    if planned.gpus and not any(re.match("--(gpus|gres$)", script.name_of(option)) for option in given):
        given.append("--gpus-per-node=1")
    alone = ["--quiet", "--nodes=1", "--ntasks=1", "--time=5", f"--immediate={_PATIENCE}", "--mpi=none"]
    return [*chosen, *(word for option in given for word in shlex.split(option)), *alone]


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


SLURM = Kind(plan, check, text, starts_together=True)  # as a job array
