"""ClusterPlan -> an sbatch script: exactly the one that `up --on` submits; it can also be submitted manually.

Submitted manually, it does not need the launcher: the code is the current folder. `up --on` passes the run and its
output folder, which has the entry script and the secrets, as arguments. The script does not contain a run ID, so it can
be resubmitted, also by a program of another run, whose variables it inherits: they are removed first.
"""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

from launcher.export.target import Keys
from launcher.job.models import Job
from launcher.job.settings import Cluster
from launcher.model.checked import OUTPUT_ROOT
from launcher.model.container import CODE
from launcher.model.facts import Launch
from launcher.model.inherited import OF_A_RANK, OF_THE_USER
from launcher.planning import command
from launcher.planning.cluster import REFUSED, ClusterPlan, Refused, build

ANY = Cluster(kind="slurm", login="local", workdir="/")  # no cluster is named: default settings
PORTS = 1000  # the port depends on the job ID, as two jobs may share a machine
_MARGIN = 300  # seconds added to Slurm's time limit, so that the entry script enforces the job's limit first
_WARNING = 90  # seconds before Slurm's time limit, for a checkpoint; Slurm's resolution is a minute
# Options of sbatch, and the variables in which Slurm passes their values to srun. A job that is submitted by a program
# of another job inherits those of that job.
_PASSED_ON = {
    "--mem": "SLURM_MEM_PER_NODE",
    "--mem-per-cpu": "SLURM_MEM_PER_CPU",
    "--mem-per-gpu": "SLURM_MEM_PER_GPU",
    "--cpus-per-task": "SLURM_CPUS_PER_TASK",
    "--cpus-per-gpu": "SLURM_CPUS_PER_GPU",
    "--gpus": "SLURM_GPUS",
    "--gpus-per-node": "SLURM_GPUS_PER_NODE",
    "--gpus-per-socket": "SLURM_GPUS_PER_SOCKET",
    "--gpus-per-task": "SLURM_GPUS_PER_TASK",
    "--gpu-bind": "SLURM_GPU_BIND",
    "--tres-per-task": "SLURM_TRES_PER_TASK",
    "--ntasks-per-core": "SLURM_NTASKS_PER_CORE",
    "--ntasks-per-gpu": "SLURM_NTASKS_PER_GPU",
    "--threads-per-core": "SLURM_THREADS_PER_CORE",
    "--distribution": "SLURM_DISTRIBUTION",
    "--hint": "SLURM_HINT",
}
_OF_A_STEP = (  # of another job's step, or the caller's defaults for srun
    *("SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE"),
    *("SLURM_TIMELIMIT", "SLURM_WORKING_DIR", "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE"),
)
_PROCESSORS = ("--exclusive", "--cpus-per-", "--cores-per-", "--ntasks-per-core", "--threads-per-core")
_TRIES = 15
_MEMORY = ("--mem", "--mem-per-cpu", "--mem-per-gpu")
_MIB = 1 << 20
_TIMEOUT, _STOPPED = 124, 143  # exit codes: of the entry script at its time limit; of a program ended by SIGTERM
_UNLESS_STOPPED = f'[ -z "$stopped" ] || exit {_STOPPED} # scancel has ended the previous command, not this script'
_ENROOT = (
    "    case $(enroot version) in [0-3].*)",
    '        echo "launcher: enroot $(enroot version) cannot import an image by its digest: 4.0 or later is required"',
    "        exit 69 ;;",
    "    esac",
)
_UNPACK = (
    'umoci unpack "--rootless=$([ "$(id -u)" -eq 0 ] && echo false || echo true)" '
    '--image "$image.part.oci:it" "$image.part"'
)
_WRITE_BUNDLE = Path(__file__).with_name("oci_bundle.py")


def check(job: Job, container: str) -> None:
    """Raises JobInvalid with all keys that an sbatch script does not support."""
    job.refuse(_refused(job, container))


KEYS = Keys(
    handled="name runtime image.base image.ref nodes gpus processes run.module run.script run.command run.args mounts "
    "env secrets secrets.name output restarts port timeout budget hang_timeout resources.memory resources.cpus "
    "cluster.partition cluster.account cluster.qos cluster.time cluster.options",
    refused={
        "resources.shm": "containers on Slurm share the machine's /dev/shm",
        "docker.ipc": "containers on Slurm share the machine's IPC",
        "models": "mount a folder of the shared file system (mounts) and set env: {HF_HOME: ..., TORCH_HOME: ...}",
        "docker.cap_add": "containers on Slurm have only the rights of their user",
        "docker.extra_hosts": "containers on Slurm use the machine's /etc/hosts",
    },
    refused_by={build: REFUSED, check: "image.torchvision image.packages"},
    unused={
        "cache": "nothing is kept of what is compiled at run time",
        "code": "it is the folder in which the script is submitted",
        "nodes.name": "Slurm chooses the machines",
        "nodes.host": "Slurm chooses the machines",
        "resources.output": "the space of `workdir` is not checked",
        "secrets.file": "the secret is in the environment of sbatch, or in a file that `up --on` sends",
    },
)


def _refused(job: Job, container: str) -> Refused:
    if job.traits.has_images and container == "none":
        what = "the cluster has no container tool: set runtime: process, or set the tool in the settings file"
        yield ("image",), f"{what} (container: pyxis, apptainer or oci) and name the cluster: --on CLUSTER"
    yield from KEYS.refusals(job)
    if job.resources.cpus is not None and job.resources.cpus % 1:
        yield ("resources", "cpus"), "Slurm allocates only whole CPUs"
    image = job.image if job.traits.has_images and container != "none" else None
    if image is not None and "@sha256:" not in (image.ref or image.base or ""):
        key = "ref" if image.ref else "base"
        name = shlex.quote(f"docker://{image.ref or image.base}")
        prints = f"skopeo inspect --format '{{{{.Name}}}}@{{{{.Digest}}}}' {name}"
        yield (
            ("image", key),
            f"is imported only once, and a tag may move: name it with its digest, which this prints: {prints}",
        )
    if image is not None and image.base is not None:
        what = "images are not built or checked on a cluster: build it first (launcher image build), and set it"
        if image.packages:
            yield ("image", "packages"), f"{what} as image.ref"
        if image.torchvision != "keep":
            yield ("image", "torchvision"), f"{what} as image.ref; or use torchvision: keep"


def render(plan: ClusterPlan, cluster: Cluster) -> str:
    """Return the script. The first node runs it; what every node runs is `_node`."""
    cluster = chosen(plan, cluster)
    parts = (
        _head(plan, cluster),
        _inherited(plan, cluster),
        _locations(plan.job),
        _exit_handling(plan.job),
        _setup(cluster),
        _rendezvous(plan.job),
        _node(plan, cluster),
        _container(plan, cluster),
        _run(plan, cluster),
    )
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def chosen(plan: ClusterPlan, cluster: Cluster) -> Cluster:
    """Return the cluster's settings, overridden by the job's options."""
    requested = {key: value for key, value in plan.job.cluster if value}
    options = (*cluster.options, *plan.job.cluster.options)  # of duplicate options, Slurm uses the last
    return cluster.model_copy(update={**requested, "options": options})


def _options(plan: ClusterPlan, cluster: Cluster) -> list[str]:
    job = plan.job
    limit = cluster.time or (job.timeout + _MARGIN if job.timeout else 0)
    cpus, _ = _processors(plan, cluster)
    options: dict[str, object] = {  # True: without a value; what is false is left out
        "job-name": job.name,
        "nodes": plan.nodes,
        "ntasks-per-node": 1,
        "open-mode": "append",
        "requeue": bool(job.restarts),
        "no-requeue": not job.restarts,
        "gpus-per-node": plan.gpus,
        "exclusive": cpus is None,
        "cpus-per-task": cpus,
        "mem": _memory(plan, cluster, every_cpu=cpus is None),
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "time": math.ceil(limit / 60),
        "signal": f"B:USR1@{min(_WARNING, limit // 4) if limit else _WARNING}",
    }
    given = [f"--{key}" if value is True else f"--{key}={value}" for key, value in options.items() if value]
    return [*given, *cluster.options]


def _head(plan: ClusterPlan, cluster: Cluster) -> list[str]:
    return [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(plan, cluster)),
        "#",
        f"# Job {plan.job.name}. `launcher up --on` submits this file. To submit it manually: cd CODE && sbatch FILE",
        f"# CPUs per node: {_processors(plan, cluster)[1]}",
    ]


def _processors(plan: ClusterPlan, cluster: Cluster) -> tuple[int | None, str]:
    """Return the number of CPUs per node, and a description. 0: set by the cluster's options. None: all CPUs.

    Slurm's default is one CPU.
    """
    cpus = plan.job.resources.cpus
    if cpus is not None:
        return int(cpus), f"{int(cpus)}, by resources.cpus of the job"
    if any(option.startswith(_PROCESSORS) for option in cluster.options):
        return 0, "by the options above"
    if cluster.cpus_per_gpu is not None and plan.gpus:
        count = plan.gpus * cluster.cpus_per_gpu
        return count, f"{count}, by cpus_per_gpu of the cluster"
    return None, "all; to use fewer, set resources.cpus, --cpus-per-task, or cpus_per_gpu of the cluster"


def _memory(plan: ClusterPlan, cluster: Cluster, *, every_cpu: bool) -> str:
    """Return the value of --mem: a job that has its nodes alone gets all of their memory (0), not DefMemPerNode."""
    if plan.job.resources.memory:
        return f"{math.ceil(plan.job.resources.memory / _MIB)}M"
    alone = every_cpu or "--exclusive" in cluster.options
    return "0" if alone and not {name_of(option) for option in cluster.options} & {*_MEMORY} else ""


def name_of(option: str) -> str:
    """Return `--mem` of `--mem=4G`."""
    return re.split("[= ]", option)[0]


def _inherited(plan: ClusterPlan, cluster: Cluster) -> list[str]:
    """Return the removal of variables of the run or job whose program has submitted this one."""
    # Slurm passes nothing on for --mem=0
    own = {name_of(option) for option in _options(plan, cluster) if option not in ("--mem=0", "--mem 0")}
    others = [name for option, name in _PASSED_ON.items() if option not in own]
    return [
        "# --- a run or a job that has submitted this one has passed on its own variables",
        'for name in "${!LAUNCHER_@}" "${!SCANCEL_@}"; do',
        f'    case $name in {" | ".join(OF_THE_USER)}) ;; *) unset "$name" ;; esac',
        "done",
        f"unset {' '.join(OF_A_RANK)}",
        f"unset {' '.join((*_OF_A_STEP, *others))}",
    ]


def _locations(job: Job) -> list[str]:
    return [
        "# --- locations; `launcher up` passes the run and its folder, and copies its entry script to .node/kit",
        f'export LAUNCHER_RUN="${{1:-{job.name}-$SLURM_JOB_ID}}"',
        'export LAUNCHER_OUTPUT="${2:-$PWD/output/$LAUNCHER_RUN}"',
        'if [ $# -gt 0 ] && [ ! -d "$LAUNCHER_OUTPUT/.node" ]; then',
        '    echo "launcher: $(hostname) does not see $LAUNCHER_OUTPUT"',
        "    exit 73",
        "fi",
        'mkdir -p "$LAUNCHER_OUTPUT/state" "$LAUNCHER_OUTPUT/errors" || exit 73',
        "save() { # FILE: write stdin to it, all or nothing",
        '    cat >"$1.part" && mv "$1.part" "$1" && return',
        '    rm -f "$1.part"',
        '    echo "launcher: could not write $1; check the free space, and the owner of its folder"',
        "    return 73",
        "}",
        *_secrets(job),
    ]


def _secrets(job: Job) -> list[str]:
    """Return checks for a manually submitted script: the secrets must be in the environment of sbatch."""
    if not job.secrets:
        return []
    missing = [
        f': "${{{secret.name}:?is a secret of the job but not in the environment of sbatch}}"' for secret in job.secrets
    ]
    return ['if [ ! -d "$LAUNCHER_OUTPUT/.node/kit" ]; then', *(f"    {line}" for line in missing), "fi"]


def _exit_handling(job: Job) -> list[str]:
    lines = [
        "# --- exit handling: the exit code is saved, as Slurm forgets finished jobs",
        "stopped='' limit='' job=$SLURM_JOB_ID",
        "# One task of an array has the ID of the array, which alone would mean all tasks.",
        '[ "$job" != "$SLURM_ARRAY_JOB_ID" ] || job=${job}_$SLURM_ARRAY_TASK_ID',
    ]
    if job.restarts:
        # SLURM_RESTART_COUNT is set only once a job has been requeued, and before may be that of another job.
        lines += [
            "restarts=$(scontrol show job \"$job\" | sed -n 's/.* Restarts=\\([0-9]*\\).*/\\1/p')",
            "restarts=${restarts:-0}",
        ]
    lines += [
        "trap 'stopped=yes' TERM # the nodes get SIGTERM too, and this script waits for them",
        "near_limit() { # signalled by Slurm (--signal)",
        "    limit=TIMEOUT",
        '    echo "launcher: Slurm\'s time limit is near; stopping the nodes"',
        '    scancel --signal=TERM "$job" # the nodes, not srun, which would kill them',
        "}",
        "trap near_limit USR1",
        "finish() {",
        "    code=$?",
        f'    [ -z "$stopped" ] || [ "$code" -ne 0 ] || code={_STOPPED}',
        f'    [ -z "$limit" ] || code={_TIMEOUT}',
    ]
    if job.restarts:
        lines += [
            f'    if [ "$code" -ne 0 ] && [ -z "$stopped" ] && [ "$restarts" -lt {job.restarts} ]; then',
            '        scontrol requeue "$job" && sleep 60 # Slurm ends this script during the sleep',
            "    fi",
        ]
    lines += [
        '    echo "$code $(date +%s) $limit" | save "$LAUNCHER_OUTPUT/state/slurm.end" || [ "$code" -ne 0 ] || code=73',
        '    exit "$code"',
        "}",
        "trap finish EXIT",
        'rm -f "$LAUNCHER_OUTPUT/state/slurm.end" || exit 73',
    ]
    if job.restarts:
        lines += [
            "# Slurm also requeues a job on its own when it has lost a machine.",
            f'if [ "$restarts" -gt {job.restarts} ]; then',
            f'    echo "launcher: the limit of {job.restarts} restarts is reached"',
            "    exit 1",
            "fi",
        ]
    return lines


def _setup(cluster: Cluster) -> list[str]:
    return ["# --- site-specific lines, from `setup` of the cluster", *cluster.setup] if cluster.setup else []


def _rendezvous(job: Job) -> list[str]:
    first = min(job.port, 65536 - PORTS)
    return [
        "# --- rendezvous: Slurm's address of the first node; a port per job, as jobs may share machines",
        "address() {",
        '    master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "    scontrol show node \"$master\" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p'",
        "}",
        "tries=1 # Slurm's controller may be busy",
        'until MASTER_ADDR=$(address) && [ -n "$MASTER_ADDR" ]; do',
        f"    {_UNLESS_STOPPED}",
        f'    if [ "$tries" -eq {_TRIES} ]; then',
        '        echo "launcher: scontrol did not give the address of the first of $SLURM_JOB_NODELIST (see above)"',
        "        exit 69",
        "    fi",
        "    tries=$((tries + 1))",
        "    sleep 2",
        "done",
        f"export MASTER_ADDR MASTER_PORT=$(({first} + SLURM_JOB_ID % {PORTS}))",
    ]


def _node(plan: ClusterPlan, cluster: Cluster) -> list[str]:
    """Return the script of each node: POSIX sh, as it may run inside a container."""
    rank, address, port = '"$LAUNCHER_NODE_RANK"', '"$MASTER_ADDR"', '"$MASTER_PORT"'
    known = {} if plan.torchrun else command.variables_without_torchrun(address, port, nodes=plan.nodes, rank=rank)
    job = plan.job
    limits = {
        "LAUNCHER_TIMEOUT": job.timeout,
        "LAUNCHER_BUDGET": job.budget,
        "LAUNCHER_HANG_TIMEOUT": job.hang_timeout,
    }
    known |= {name: str(value) for name, value in limits.items() if value is not None} | command.SAVING
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
        'if [ -d "$LAUNCHER_OUTPUT/.node/kit" ]; then # each node has a copy, with its pipes and its home',
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
            f'set -- {options} ${{kit:+--log_dir "$kit/torchrun"}} \\',
            '    --no_python "$@"',
            f'if [ -n "$kit" ]; then set -- "$kit/torchrun.py" "$@"; else set -- -m {Launch.RUN.value} "$@"; fi',
            f'set -- {shlex.quote(cluster.python)} "$@"',
        ]
    body += [
        '[ -z "$kit" ] || set -- sh "$kit/entry.sh" "$@"',
        "# srun kills all nodes as soon as one fails: a node that is stopped exits with 0, as others may need time",
        "child='' terminated=''",
        'trap \'terminated=yes; [ -z "$child" ] || kill -s TERM "$child"\' TERM # some versions signal only this shell',
        '"$@" <&0 &',
        "child=$!",
        '[ -z "$terminated" ] || kill -s TERM "$child"',
        'wait "$child"',
        "code=$?",
        'while kill -0 "$child" 2>/dev/null; do',
        '    wait "$child"',
        "    code=$?",
        "done",
        '[ -z "$terminated" ] || code=0',
        'exit "$code"',
    ]
    lines, end = "\n".join(body).split("\n"), "END"
    while end in lines:
        end += "_"
    save = f"save \"$LAUNCHER_OUTPUT/state/node.sh\" <<'{end}' || exit 73"
    return ["# --- script of each node", save, *lines, end]


def _container(plan: ClusterPlan, cluster: Cluster) -> list[str]:
    """Return the import of the image with the site's tool: once per digest, for all jobs that use it."""
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
        'exec 9>"$image.lock" || exit 73',
        "# another job may be importing it",
        'flock 9 || [ -n "$stopped" ] ||',
        '    echo "launcher: could not lock $image.lock (see above): another job may import the image too"',
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
    """Return the creation of the job's bundle: the image's bundle plus the mounts of the job."""
    script = _WRITE_BUNDLE.read_text(encoding="utf-8")
    return [
        "",
        "# --- the image's bundle, plus this job's folders and the machine's network, IPC, devices and /tmp",
        'bundle="$LAUNCHER_OUTPUT/state/bundle" && mkdir -p "$bundle" || exit 73',
        f'python3 - "$image" "$bundle" {CODE} {" ".join(_mounts(plan))} /dev:/dev /tmp:/tmp <<\'END\' || exit 69',
        *script.splitlines(),
        "END",
        "# Older Slurm gives all containers the variables of one task: the rank is passed explicitly.",
        f"echo '* env LAUNCHER_NODE_RANK=%t sh {plan.job.output}/state/node.sh' | save \"$bundle/tasks\" || exit 73",
    ]


def _mounts(plan: ClusterPlan) -> list[str]:
    """Return SOURCE:TARGET[:ro] of each mount, quoted for the shell."""
    own = [f'"$PWD":{CODE}', f'"$LAUNCHER_OUTPUT":{shlex.quote(plan.job.output)}']
    return own + [shlex.quote(f"{m.source}:{m.target}{':ro' if m.read_only else ''}") for m in plan.job.mounts]


def _run(plan: ClusterPlan, cluster: Cluster) -> list[str]:
    mounts = _mounts(plan)
    # mpi: a site's default of pmix breaks torchrun. wait: otherwise srun ends the other nodes soon after one succeeds.
    # export: SLURM_EXPORT_ENV may be that of a site or of another job.
    step = ["srun --mpi=none --kill-on-bad-exit=1 --wait=0 --export=ALL"]
    step.append(
        '${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}'
    )  # since 22.05 srun does not inherit it
    if not plan.image:
        step.append('sh "$LAUNCHER_OUTPUT/state/node.sh"')
    elif cluster.container == "pyxis":  # on srun: not every site's sbatch has these options
        step += ['--container-image="$image"', f"--container-mounts={','.join(mounts)}", "--no-container-mount-home"]
        step += [f"--container-workdir={CODE}", f"sh {shlex.quote(plan.job.output)}/state/node.sh"]
    elif cluster.container == "oci":
        step.append('--container="$bundle" --multi-prog "$bundle/tasks"')
    else:
        step.append(f"apptainer exec {'--nv ' if plan.gpus else ''}--no-home --pwd {CODE}")
        step += [f"--bind {mount}" for mount in mounts]
        step.append(f'"$image" sh {shlex.quote(plan.job.output)}/state/node.sh')
    return [
        "# --- run all nodes; if one fails, the others are ended",
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
