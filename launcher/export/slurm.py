"""ClusterPlan -> an sbatch script: what `up --on` submits, byte for byte, and what a person can submit by hand.

By hand it needs nothing of ours: the code is the folder that it is submitted from. `up --on` says by variables where it
has put the code, the entry script and the secrets. Nothing in it names a run, so that it can be submitted again.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from launcher.job.models import Job
from launcher.job.settings import Cluster
from launcher.model.checked import OUTPUT_ROOT
from launcher.model.container import CODE
from launcher.planning import command
from launcher.planning.cluster import ClusterPlan, Refused

ANY = Cluster(kind="slurm", login="local", workdir="/")  # no cluster is named: nothing is known of it
PORTS = 1000  # one more of them for each job's id: two jobs may share a machine
_MARGIN = 300  # seconds that Slurm leaves the entry script to enforce the time limit itself
_WARNING = 90  # seconds before Slurm's own time limit, for a checkpoint; Slurm counts them to a minute
_PROCESSORS = ("--exclusive", "--cpus-per-", "--cores-per-", "--ntasks-per-core", "--threads-per-core")
_MIB = 1 << 20
_TIMEOUT, _STOPPED = 124, 143  # as of the entry script at its own time limit; and of a program that SIGTERM has ended
_UNLESS_STOPPED = f'[ -z "$stopped" ] || exit {_STOPPED} # scancel has ended what ran here, and not this script'
_ENROOT = (
    "    case $(enroot version) in [0-3].*)",
    '        echo "launcher: enroot $(enroot version) cannot import an image by its digest: 4.0 or newer is needed"',
    "        exit 69 ;;",
    "    esac",
)
_UNPACK = 'umoci unpack $([ "$(id -u)" -eq 0 ] || echo --rootless) --image "$image.part.oci:it" "$image.part"'
_WRITE_BUNDLE = Path(__file__).with_name("oci_bundle.py")


def check(job: Job, container: str) -> None:
    """Raises JobInvalid with every key that an sbatch script cannot carry."""
    job.refuse(_refused(job, container))


def _refused(job: Job, container: str) -> Refused:
    if job.runtime == "docker" and container == "none":
        what = "no containers are known there: set runtime: process, or name their tool in the settings file"
        yield ("image",), f"{what} (container: pyxis, apptainer or oci), and the cluster: --on CLUSTER"
    if job.docker.ipc != "host":
        yield ("docker", "ipc"), "containers on Slurm share the machine's IPC: leave it out"
    if job.docker.cap_add:
        yield ("docker", "cap_add"), "containers on Slurm have their user's rights only: leave it out"
    if job.docker.extra_hosts:
        yield ("docker", "extra_hosts"), "containers on Slurm have the machine's /etc/hosts: leave it out"
    if job.resources.cpus is not None and job.resources.cpus % 1:
        yield ("resources", "cpus"), "Slurm gives whole CPUs"
    image = job.image if job.runtime == "docker" and container != "none" else None
    if image is not None and "@sha256:" not in (image.ref or image.base or ""):
        key = "ref" if image.ref else "base"
        yield ("image", key), "is imported there once, and a tag may move: add its digest, NAME@sha256:..."


def render(plan: ClusterPlan, cluster: Cluster) -> str:
    """The whole script."""
    cluster = chosen(plan, cluster)
    parts = (
        _head(plan, cluster),
        _batch(plan, cluster.setup),
        _node(plan, cluster),
        _container(plan, cluster),
        _run(plan, cluster),
    )
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def chosen(plan: ClusterPlan, cluster: Cluster) -> Cluster:
    """The cluster's settings with what the job asks for."""
    asked = {key: value for key, value in plan.job.cluster if value}
    options = (*cluster.options, *plan.job.cluster.options)  # of two that are the same, Slurm takes the last
    return cluster.model_copy(update={**asked, "options": options})


def _head(plan: ClusterPlan, cluster: Cluster) -> list[str]:
    job, resources = plan.job, plan.job.resources
    limit = cluster.time or (job.timeout + _MARGIN if job.timeout else 0)
    cpus, processors = _processors(plan, cluster)
    options: dict[str, object] = {
        "job-name": job.name,
        "nodes": plan.nodes,
        "ntasks-per-node": 1,
        "open-mode": "append",
        "requeue" if job.restarts else "no-requeue": True,
        "gpus-per-node": plan.gpus,
        "exclusive" if cpus is None else "cpus-per-task": True if cpus is None else cpus,
        "mem": f"{math.ceil(resources.memory / _MIB)}M" if resources.memory else "",
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "time": math.ceil(limit / 60),
        "signal": f"B:USR1@{min(_WARNING, limit // 4) if limit else _WARNING}",
    }
    given = [f"--{key}" if value is True else f"--{key}={value}" for key, value in options.items() if value]
    return [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in [*given, *cluster.options]),
        "#",
        f"# The job {job.name}. `launcher up --on` submits this very file. By hand: cd CODE && sbatch THIS-FILE",
        f"# Processors of each node: {processors}",
    ]


def _processors(plan: ClusterPlan, cluster: Cluster) -> tuple[int | None, str]:
    """How many of each node, 0: the cluster's own options say it, None: all of them; and the same in words.

    Slurm's own default is one.
    """
    cpus = plan.job.resources.cpus
    if cpus is not None:
        return int(cpus), f"{int(cpus)}, by resources.cpus of the job"
    if any(option.startswith(_PROCESSORS) for option in cluster.options):
        return 0, "by the options above"
    if cluster.cpus_per_gpu is not None and plan.gpus:
        count = plan.gpus * cluster.cpus_per_gpu
        return count, f"{count}, by cpus_per_gpu of the cluster"
    return None, "all of them; for a part: resources.cpus or --cpus-per-task, or cpus_per_gpu of the cluster"


def _batch(plan: ClusterPlan, setup: Sequence[str]) -> list[str]:
    """What the first node does for all."""
    job = plan.job
    again = [
        f'    if [ "$code" -ne 0 ] && [ -z "$stopped" ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.restarts} ]; then',
        '        scontrol requeue "$job" && sleep 60 # Slurm ends this script meanwhile',
        "    fi",
    ]
    too_often = [
        "# Slurm requeues a job by itself, too, when it has lost a machine.",
        f'if [ "${{SLURM_RESTART_COUNT:-0}}" -gt {job.restarts} ]; then',
        f'    echo "launcher: {job.restarts} restarts are used up"',
        "    exit 1",
        "fi",
    ]
    first = min(job.port, 65536 - PORTS)
    return [
        "# --- where things are; `launcher up` sets the first two, and puts its entry script into .node/kit",
        f'export LAUNCHER_RUN="${{LAUNCHER_RUN:-{job.name}-$SLURM_JOB_ID}}"',
        'export LAUNCHER_OUTPUT="${LAUNCHER_OUTPUT:-$PWD/output/$LAUNCHER_RUN}"',
        'mkdir -p "$LAUNCHER_OUTPUT/state" "$LAUNCHER_OUTPUT/errors" || exit 73',
        *_secrets(job),
        "",
        "# --- the end: its exit code is kept for when Slurm has forgotten the job",
        "stopped='' limit='' job=$SLURM_JOB_ID",
        "# One task of an array has the array's own id, which by itself means all of them.",
        '[ "$job" != "$SLURM_ARRAY_JOB_ID" ] || job=${job}_$SLURM_ARRAY_TASK_ID',
        "trap 'stopped=yes' TERM # the nodes get it too, and are waited for",
        "near_limit() { # told by Slurm (--signal)",
        "    limit=TIMEOUT",
        '    echo "launcher: the time limit of Slurm is near: the nodes are told to stop"',
        '    scancel --signal=TERM "$job" # its nodes, and not srun, which would kill them',
        "}",
        "trap near_limit USR1",
        "finish() {",
        "    code=$?",
        f'    [ -z "$stopped" ] || [ "$code" -ne 0 ] || code={_STOPPED}',
        f'    [ -z "$limit" ] || code={_TIMEOUT}',
        *(again if job.restarts else ()),
        '    echo "$code $(date +%s) $limit" >"$LAUNCHER_OUTPUT/state/slurm.end"',
        '    exit "$code"',
        "}",
        "trap finish EXIT",
        'rm -f "$LAUNCHER_OUTPUT/state/slurm.end"',
        *(too_often if job.restarts else ()),
        "",
        *(("# --- the site's own lines, by `setup` of the cluster", *setup, "") if setup else ()),
        "# --- the rendezvous: the first node, as Slurm reaches it; a port of this job, as machines may be shared",
        'master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "MASTER_ADDR=$(scontrol show node \"$master\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')",
        f"export MASTER_ADDR MASTER_PORT=$(({first} + SLURM_JOB_ID % {PORTS}))",
    ]


def _secrets(job: Job) -> list[str]:
    """Of a script that is submitted by hand: they must be in the environment of sbatch."""
    if not job.secrets:
        return []
    missing = [
        f': "${{{secret.name}:?is a secret of the job, and not in the environment of sbatch}}"'
        for secret in job.secrets
    ]
    return ['if [ ! -d "$LAUNCHER_OUTPUT/.node/kit" ]; then', *(f"    {line}" for line in missing), "fi"]


def _node(plan: ClusterPlan, cluster: Cluster) -> list[str]:
    """A script for each node: POSIX sh, as it may run inside a container."""
    rank, address, port = '"$LAUNCHER_NODE_RANK"', '"$MASTER_ADDR"', '"$MASTER_PORT"'
    known = {} if plan.torchrun else command.bare(address, port, nodes=plan.nodes, rank=rank)
    limits = {"LAUNCHER_TIMEOUT": plan.job.timeout, "LAUNCHER_HANG_TIMEOUT": plan.job.hang_timeout}
    known |= {name: str(value) for name, value in limits.items() if value is not None}
    known |= {name: shlex.quote(value) for name, value in plan.env.items()}
    inside = [f"export LAUNCHER_OUTPUT={shlex.quote(plan.job.output)}"] if plan.image else []
    if plan.image and cluster.container == "oci":
        inside.append(f'. "$LAUNCHER_OUTPUT/state/bundle/env" && cd {CODE} || exit 73')
    body = [
        *inside,
        'export LAUNCHER_NODE_RANK="${LAUNCHER_NODE_RANK:-$SLURM_NODEID}"',
        'export LAUNCHER_NODE="node-$LAUNCHER_NODE_RANK"',
        'export TORCHELASTIC_ERROR_FILE="$LAUNCHER_OUTPUT/errors/$LAUNCHER_NODE.json"',
        *(f"export {name}={value}" for name, value in known.items()),
        "kit=''",
        '[ $# -eq 0 ] || exec sh "$LAUNCHER_OUTPUT/.node/$LAUNCHER_NODE/kit/within.sh" "$@" # launcher exec',
        'if [ -d "$LAUNCHER_OUTPUT/.node/kit" ]; then # each node has a copy: its pipes and its home are there',
        '    kit="$LAUNCHER_OUTPUT/.node/$LAUNCHER_NODE/kit"',
        '    rm -rf "$kit" && mkdir -p "${kit%/kit}" && cp -Rp "$LAUNCHER_OUTPUT/.node/kit" "$kit" || exit 73',
        "fi",
        f"set -- {shlex.join(plan.program)}",
    ]
    if plan.torchrun:
        run = '"$LAUNCHER_RUN"'
        options = " ".join(command.torchrun_options(plan.nodes, rank, plan.processes, address, port, run))
        body += [
            '[ -z "$kit" ] || set -- sh "$kit/rank.sh" "$@"',
            f"set -- {shlex.quote(cluster.python)} -m torch.distributed.run {options} \\",
            '    ${kit:+--log_dir "$kit/torchrun"} --no_python "$@"',
        ]
    body += [
        '[ -z "$kit" ] || set -- sh "$kit/entry.sh" "$@"',
        "# srun kills all nodes as soon as one fails: one that is told to stop does not, as others may need time",
        "child='' told=''",
        'trap \'told=yes; [ -z "$child" ] || kill -s TERM "$child"\' TERM # some Slurms signal this shell only',
        '"$@" <&0 &',
        "child=$!",
        '[ -z "$told" ] || kill -s TERM "$child"',
        'wait "$child"',
        "code=$?",
        'while kill -0 "$child" 2>/dev/null; do',
        '    wait "$child"',
        "    code=$?",
        "done",
        '[ -z "$told" ] || code=0',
        'exit "$code"',
    ]
    lines, end = "\n".join(body).split("\n"), "END"
    while end in lines:
        end += "_"
    return ["# --- what each node runs", f"cat >\"$LAUNCHER_OUTPUT/state/node.sh\" <<'{end}'", *lines, end]


def _container(plan: ClusterPlan, cluster: Cluster) -> list[str]:
    """The image imported by the site's own tool: once, by digest, however many jobs want it."""
    if not plan.image:
        return []
    name, _, digest = plan.image.partition("@")
    first, slash, rest = name.partition("/")
    registry = f"{first}#{rest}" if slash and {".", ":"} & set(first) else name
    source = f"docker://{_without_tag(registry if cluster.container == 'pyxis' else name)}@{digest}"
    suffix, *commands = {
        "pyxis": (".sqsh", f'enroot import --output "$image.part" {source}'),
        "apptainer": (".sif", f'apptainer pull "$image.part" {source}'),
        "oci": (".bundle", f'skopeo copy {source} "oci:$image.part.oci:it"', _UNPACK, 'rm -r "$image.part.oci"'),
    }[cluster.container]
    commands.append('mv "$image.part" "$image" || exit 69')
    image = f"{cluster.workdir}/{OUTPUT_ROOT}/images/{digest.replace(':', '-')}{suffix}"
    return [
        f"# --- the image {plan.image}",
        f"image={shlex.quote(image)}",
        'mkdir -p "${image%/*}" || exit 73',
        'exec 9>"$image.lock" && flock 9 # another job may be importing it',
        _UNLESS_STOPPED,
        'if [ ! -e "$image" ]; then',
        *(_ENROOT if cluster.container == "pyxis" else ()),
        '    rm -rf "$image.part"*',
        "    " + " &&\n        ".join(commands),
        "fi",
        "exec 9>&-",
        *(_bundle(plan) if cluster.container == "oci" else ()),
    ]


def _bundle(plan: ClusterPlan) -> list[str]:
    """Slurm's own containers get their mounts from their bundle: this job's is the image's with more of them."""
    script = _WRITE_BUNDLE.read_text(encoding="utf-8")
    return [
        "",
        "# --- the image's bundle with this job's folders, and the machine's network, IPC, devices and /tmp",
        'bundle="$LAUNCHER_OUTPUT/state/bundle" && mkdir -p "$bundle" || exit 73',
        f'python3 - "$image" "$bundle" {CODE} {" ".join(_places(plan))} /dev:/dev /tmp:/tmp <<\'END\' || exit 69',
        *script.splitlines(),
        "END",
        "# Older Slurm gives all of its containers the variables of one task: each is told its own rank.",
        f"echo '* env LAUNCHER_NODE_RANK=%t sh {plan.job.output}/state/node.sh' >\"$bundle/tasks\"",
    ]


def _places(plan: ClusterPlan) -> list[str]:
    """SOURCE:TARGET[:ro] of each mount, as shell words."""
    own = [f'"$PWD":{CODE}', f'"$LAUNCHER_OUTPUT":{shlex.quote(plan.job.output)}']
    return own + [shlex.quote(f"{m.source}:{m.target}{':ro' if m.read_only else ''}") for m in plan.job.mounts]


def _run(plan: ClusterPlan, cluster: Cluster) -> list[str]:
    places = _places(plan)
    # mpi: a site's own default of pmix breaks torchrun. wait: else the others end soon after one that has ended well.
    step = ["srun --mpi=none --kill-on-bad-exit=1 --wait=0"]
    step.append(
        '${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}'
    )  # since 22.05 srun does not take it over
    if not plan.image:
        step.append('sh "$LAUNCHER_OUTPUT/state/node.sh"')
    elif cluster.container == "pyxis":  # on srun: not every site's sbatch has these options
        step += ['--container-image="$image"', f"--container-mounts={','.join(places)}", "--no-container-mount-home"]
        step += [f"--container-workdir={CODE}", f"sh {shlex.quote(plan.job.output)}/state/node.sh"]
    elif cluster.container == "oci":
        step.append('--container="$bundle" --multi-prog "$bundle/tasks"')
    else:
        step.append(f"apptainer exec {'--nv ' if plan.gpus else ''}--no-home --pwd {CODE}")
        step += [f"--bind {place}" for place in places]
        step.append(f'"$image" sh {shlex.quote(plan.job.output)}/state/node.sh')
    return [
        "# --- all nodes; the first that fails ends the others",
        _UNLESS_STOPPED,
        " \\\n    ".join(step) + " &",
        "wait $!",
        "code=$?",
        "while kill -0 $! 2>/dev/null; do # a signal ends `wait`, not the nodes",
        "    wait $!",
        "    code=$?",
        "done",
        'exit "$code"',
    ]


def _without_tag(name: str) -> str:
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(":")[0]
