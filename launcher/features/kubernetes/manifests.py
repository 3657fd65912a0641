"""ClusterPlan -> Kubernetes manifests: a JobSet (v1alpha2), or an Indexed Job and a headless Service.

The image contains the code (`--image`), the output goes to a persistent volume claim, secrets are references. The
rendezvous address is the DNS name of the first pod, which is created later than the pods: each pod waits for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from launcher.errors import UsageError
from launcher.job.models import Job
from launcher.job.parts import ClusterOptions
from launcher.job.settings import Kubernetes
from launcher.model.container import CODE, WORKDIR
from launcher.model.plan import RunId
from launcher.planning import command
from launcher.planning.cluster import ClusterPlan, Refused

Manifest = dict[str, Any]
SHM = "/dev/shm"  # noqa: S108 - the pod's
ANY = Kubernetes(kind="kubernetes")  # no cluster is named: default settings
_LONGEST = 63  # characters of a pod's name, which is the job's and a number, and of its host name
_RANDOM = "-abcde"  # suffix of a pod's name
_UID = 1000  # of pods that do not need root; `pod` of the settings overrides it
_GRACE = 45  # seconds from SIGTERM to SIGKILL, as for `launcher down`
_LATE = 10  # seconds that a failed pod waits after its program has exited
_FAILED_WRITE, _TIMEOUT = 73, 124  # exit codes, the same as those of the entry script on other nodes
_RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# glibc and musl have getent, busybox has nslookup. After ten minutes the program reports the missing name.
_WAIT = f"""\
tries=0
until getent hosts "$MASTER_ADDR" >/dev/null 2>&1 || nslookup "$MASTER_ADDR" >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 600 ] || break
    sleep 1
done
mkdir -p "$LAUNCHER_OUTPUT/errors" "$LAUNCHER_OUTPUT/state" || exit {_FAILED_WRITE}
if [ "$PWD" = {CODE} ]; then # work in a copy, as what the program writes there must outlive the pod
    work=$LAUNCHER_OUTPUT/{WORKDIR}/$LAUNCHER_NODE
    if [ ! -d "$work" ]; then
        rm -rf "$work.part" && mkdir -p "$work.part" && cp -R . "$work.part" && mv "$work.part" "$work" ||
            exit {_FAILED_WRITE}
    fi
    cd "$work" || exit {_FAILED_WRITE}
fi
if [ -n "$LAUNCHER_TIMEOUT" ]; then # since the first start of this node, over restarts
    began=$LAUNCHER_OUTPUT/state/$LAUNCHER_NODE.began
    [ -s "$began" ] || date +%s >"$began" || exit {_FAILED_WRITE}
    left=$((LAUNCHER_TIMEOUT - $(date +%s) + $(cat "$began")))
    [ $left -gt 0 ] || exit {_TIMEOUT}
    set -- timeout -k {_GRACE} $left "$@"
fi
child='' terminated=''
trap 'terminated=yes; [ -z "$child" ] || kill -s TERM "$child" 2>/dev/null' TERM
"$@" <&0 &
child=$!
[ -z "$terminated" ] || kill -s TERM "$child"
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do # a signal ends `wait`, not the program
    wait "$child"
    code=$?
done
if [ "$code" -eq 137 ] && [ -n "$LAUNCHER_TIMEOUT" ] &&
    [ $(($(date +%s) - $(cat "$began"))) -ge "$LAUNCHER_TIMEOUT" ]; then
    code={_TIMEOUT} # it did not exit on SIGTERM
fi
# The peers of a drained pod fail too. They exit later, so that its own end, which is no restart, is seen first.
case $code$terminated in
    0 | {_TIMEOUT} | *yes) ;;
    *) sleep "${{LAUNCHER_LATE:-0}}" ;;
esac
exit "$code"
"""
_OF_THE_JOB = {"cpu": "cpus", "memory": "memory"}  # the key in `resources`
_PLAIN = re.compile("[A-Za-z]{3}[A-Za-z0-9./-]*")  # a key that no parser reads as a number
_KEYWORDS = ("yes", "off", "true", "false", "null", "nan", "inf")  # ... or as one of these


class _ManifestDumper(yaml.SafeDumper):
    """Quotes every string: PyYAML does not quote 1e-4 and y, which Go's parser reads as other types."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", str(data), style="|" if data == _WAIT else '"')

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        for key, _ in node.value:
            if _PLAIN.fullmatch(key.value) and key.value.lower() not in _KEYWORDS:
                key.style = None
        return node


_ManifestDumper.add_representer(str, _ManifestDumper.represent_str)
_ManifestDumper.add_multi_representer(int, _ManifestDumper.represent_int)  # durations are of a type of their own


def check(job: Job, *, jobset: bool, image: str | None) -> None:
    """Raises JobInvalid with all keys that the manifest does not support, UsageError without an image."""
    job.refuse(_refused(job, jobset=jobset))
    if not image:
        what = "is required: the image of the pods must contain the code, at " + CODE
        fix = (
            "build and push one: launcher image build JOB --with-code --push REGISTRY; then: --image REGISTRY/NAME:TAG"
        )
        raise UsageError("--image", what, fix)


def _refused(job: Job, *, jobset: bool) -> Refused:
    if not job.traits.has_images:
        yield ("runtime",), "pods are containers: expected docker"
    longest = _LONGEST - len(_pod_name("", len(job.nodes) - 1, jobset=jobset) + _RANDOM)
    if not re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", job.name) or len(job.name) > longest:
        what = "must start with a lowercase letter, end with a letter or digit, and have at most"
        yield ("name",), f"{what} {longest} characters: pods are named {job.name}-..., which must be a DNS name"
    if job.cluster != ClusterOptions():
        yield ("cluster",), "contains options for Slurm: remove it"
    if job.restarts and not jobset and job.min_nodes is None:  # min_nodes has restarts, and is refused itself
        yield ("restarts",), "a Job restarts single pods, not the run: use --to jobset"
    for data in job.data:
        volumes = "pod: {volumes: [...], containers: [{name: node, volumeMounts: [...]}]}"
        what = (
            "pods get no copies of data: put it on a volume that all machines reach, and name that in the settings of"
        )
        yield ("data", data.name), f"{what} the cluster: {volumes}"
    if job.docker.ipc not in ("host", "private"):
        yield ("docker", "ipc"), "each pod has its own /dev/shm: expected host or private"
    for name, ip in job.docker.extra_hosts.items():
        if ip == "host-gateway":
            yield ("docker", "extra_hosts", name), "pods do not support host-gateway: give an IP address"
        if not re.fullmatch("[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name):
            yield (
                ("docker", "extra_hosts", name),
                "host names of pods may contain only lowercase letters, digits, - and .",
            )
    for mount in job.mounts:
        if mount.target == SHM:
            yield ("mounts", mount.source), f"each pod has its own {SHM}: remove it"


def unheeded(job: Job) -> Iterator[str]:
    """Yield a warning about each key that the job has, and that the manifest does without."""
    if job.hang_timeout is not None:
        yield "hang_timeout has no effect: Kubernetes does not detect a hang; timeout ends a job that hangs"


def _pod_name(job: str, index: int, *, jobset: bool) -> str:
    """Return a pod's name without its random suffix, which is also its host name."""
    return f"{job}-node-0-{index}" if jobset else f"{job}-{index}"


@dataclass(frozen=True)
class PodTarget:
    """Inputs of a manifest in addition to the plan. run: name of the folder in the claim, new for each export."""

    image: str
    run: RunId
    settings: Kubernetes


def jobset(plan: ClusterPlan, target: PodTarget) -> list[Manifest]:
    """Return the manifest of a JobSet, which restarts all pods together."""
    name = plan.job.name
    pods = {"spec": _job_spec(plan, target, f"{_pod_name(name, 0, jobset=True)}.{name}", drained="FailJob")}
    by_policy = ["PodFailurePolicy"]  # set by _job_spec; any other failure counts as a restart
    rules = [{"name": "drained", "action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": by_policy}]
    if plan.job.timeout is not None:  # which applies to all starts together
        ended = {"onJobFailureReasons": by_policy, "onJobFailureMessagePatterns": [f"exit code {_TIMEOUT} "]}
        rules.insert(0, {"name": "timelimit", "action": "FailJobSet", **ended})  # the patterns require JobSet 0.10
    failure = {"maxRestarts": plan.job.restarts, "rules": rules}
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": failure,
        **_kept(target.settings),
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": pods}],
    }
    metadata = _named(name, target.settings, queued=True)
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}]


def indexed_job(plan: ClusterPlan, target: PodTarget) -> list[Manifest]:
    """Return the manifests of the Service that provides the DNS names of the pods, and of the Job."""
    name, settings = plan.job.name, target.settings
    spec = _job_spec(plan, target, f"{_pod_name(name, 0, jobset=False)}.{name}", drained="Ignore")
    spec |= _kept(settings)
    spec["template"]["spec"]["subdomain"] = name
    port = {"name": "rendezvous", "port": plan.job.port}
    selector = {"batch.kubernetes.io/job-name": name}
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": [port]}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": _named(name, settings), "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": _named(name, settings, queued=True), "spec": spec},
    ]


def _named(job: str, settings: Kubernetes, *, queued: bool = False) -> dict[str, Any]:
    queue = {"kueue.x-k8s.io/queue-name": settings.queue} if settings.queue and queued else {}
    namespace = {"namespace": settings.namespace} if settings.namespace else {}
    own = {"app.kubernetes.io/managed-by": "launcher", **queue}
    return {"name": job, **namespace, **_marked(settings, own)}


def _marked(settings: Kubernetes, own: Mapping[str, str]) -> dict[str, Any]:
    """Return labels and annotations, those of the settings last."""
    marks = {"labels": {**own, **settings.labels}, "annotations": {**settings.annotations}}
    return {key: value for key, value in marks.items() if value}


def _kept(settings: Kubernetes) -> dict[str, int]:
    """Return how long Kubernetes keeps what has ended."""
    return {} if settings.ttl is None else {"ttlSecondsAfterFinished": settings.ttl}


def _job_spec(plan: ClusterPlan, target: PodTarget, master: str, *, drained: str) -> dict[str, Any]:
    """Return the spec of a Job. A failed pod is not replaced: its peers fail too, so all pods end or restart together.

    drained: action after a drain or a preemption of a pod. FailJob: the JobSet is restarted, which is not counted.
    Ignore: a Job without a JobSet can only replace the pod.
    """
    rules: list[dict[str, Any]] = []
    if plan.job.timeout is not None:
        codes = {"containerName": "node", "operator": "In", "values": [_TIMEOUT]}
        rules.append({"action": "FailJob", "onExitCodes": codes})
    rules.append({"action": drained, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    marked = _marked(target.settings, {})  # schedulers read those of the pods
    return {
        "completionMode": "Indexed",
        "completions": plan.nodes,
        "parallelism": plan.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": {
            **({"metadata": marked} if marked else {}),
            "spec": _merged(_pod(plan, target, master), target.settings.pod),
        },
    }


def not_restricted(job: Job) -> str:
    """Return why a namespace with the Pod Security level "restricted" rejects the pods; "" if it accepts them."""
    why = ["mounts are folders of the machine (hostPath)"] if job.mounts else []
    why += ["docker.cap_add"] if job.docker.cap_add else []
    why += ["docker.ipc: host"] if _host_ipc(job) else []
    return ", ".join(why)


def _host_ipc(job: Job) -> bool:
    """Return whether the job file requests the host's IPC: by default a pod has its own /dev/shm."""
    return job.docker.ipc == "host" and "ipc" in job.docker.model_fields_set


def _merged(base: Any, override: Any) -> Any:
    """Merge mappings by key and lists of named items by name; concatenate other lists."""
    if isinstance(base, dict) and isinstance(override, Mapping):
        return base | {key: _merged(base[key], value) if key in base else value for key, value in override.items()}
    if not isinstance(base, list) or not isinstance(override, (list, tuple)):
        return override
    made = [*base]
    names = [item.get("name") if isinstance(item, dict) else None for item in base]
    for item in override:
        name = item.get("name") if isinstance(item, Mapping) else None
        if name is None or name not in names:
            made.append(item)
        else:
            made[names.index(name)] = _merged(made[names.index(name)], item)
    return made


def _pod(plan: ClusterPlan, target: PodTarget, master: str) -> dict[str, Any]:
    resources, docker, settings = plan.job.resources, plan.job.docker, target.settings
    volumes, mounts = _volumes(plan.job)
    container: dict[str, Any] = {
        "name": "node",
        "image": target.image,
        "workingDir": CODE,
        "command": ["sh", "-c", _WAIT, "launcher"],
        "args": _arguments(plan),
        "env": _env(plan, target.run, master),
        "volumeMounts": mounts,
    }
    limits: dict[str, str] = {"nvidia.com/gpu": str(plan.gpus)} if plan.gpus else {}
    limits |= {} if resources.memory is None else {"memory": str(resources.memory)}
    limits |= {} if resources.cpus is None else {"cpu": f"{max(1, round(resources.cpus * 1000))}m"}
    if limits:
        container["resources"] = {"limits": limits, "requests": dict(limits)}
    pod: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": _GRACE}
    if not not_restricted(plan.job):
        ids = {"runAsUser": _UID, "runAsGroup": _UID, "fsGroup": _UID}
        pod["securityContext"] = {"runAsNonRoot": True, **ids, "seccompProfile": {"type": "RuntimeDefault"}}
        container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    else:  # as the image's user, who can write to the claim through its group
        pod["securityContext"] = {"fsGroup": _UID}
        if docker.cap_add:
            container["securityContext"] = {"capabilities": {"add": [c.removeprefix("CAP_") for c in docker.cap_add]}}
    pod |= {"containers": [container], "volumes": volumes}
    if _host_ipc(plan.job):
        pod["hostIPC"] = True
    if settings.service_account:
        pod["serviceAccountName"] = settings.service_account
    if settings.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in settings.pull_secrets]
    if docker.extra_hosts:
        pod["hostAliases"] = [{"ip": ip, "hostnames": [name]} for name, ip in docker.extra_hosts.items()]
    return pod


def _arguments(plan: ClusterPlan) -> list[str]:
    program = [_literal(argument) for argument in plan.program]
    if not plan.torchrun:
        return program
    address, port, run = "$(MASTER_ADDR)", "$(MASTER_PORT)", "$(LAUNCHER_RUN)"
    options = command.torchrun_options(plan.nodes, "$(LAUNCHER_NODE_RANK)", plan.processes, address, port, run)
    return ["python3", "-m", "torch.distributed.run", *options, "--no_python", *program]


def _env(plan: ClusterPlan, run: RunId, master: str) -> list[dict[str, Any]]:
    """Return the variables, the launcher's first, overridden by the job's. $(NAME) refers to an earlier variable."""
    rank = "LAUNCHER_NODE_RANK"
    variables = {
        "LAUNCHER_RUN": run,
        "LAUNCHER_NODE": f"node-$({rank})",
        "LAUNCHER_OUTPUT": f"{_literal(plan.job.output)}/{run}",
        "TORCHELASTIC_ERROR_FILE": f"$(LAUNCHER_OUTPUT)/errors/node-$({rank}).json",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(plan.job.port),
        **command.SAVING,
    }
    if plan.nodes > 1:
        variables["LAUNCHER_LATE"] = str(_LATE)
    if plan.job.timeout is not None:
        variables["LAUNCHER_TIMEOUT"] = str(plan.job.timeout)
    if not not_restricted(plan.job):  # the user does not exist in the image: it has no home and no name
        variables |= {"HOME": "/tmp", "USER": "launcher"}  # noqa: S108 - the pod's
    if not plan.torchrun:
        variables |= command.variables_without_torchrun(master, plan.job.port, nodes=plan.nodes, rank=f"$({rank})")
    variables |= {name: _literal(value) for name, value in plan.env.items()}
    found: list[dict[str, Any]] = [{"name": rank, "valueFrom": {"fieldRef": {"fieldPath": _RANK}}}]
    found += [{"name": name, "value": value} for name, value in variables.items()]
    for secret in plan.job.secrets:
        reference = {"name": _secret(plan.job), "key": secret.name}
        found.append({"name": secret.name, "valueFrom": {"secretKeyRef": reference}})
    return found


def _volumes(job: Job) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return volumes and mounts. The default /dev/shm of a pod has 64 MB, too little for data loaders: use memory."""
    size = {} if job.resources.shm is None else {"sizeLimit": str(job.resources.shm)}
    volumes: list[dict[str, Any]] = [{"name": "output", "persistentVolumeClaim": {"claimName": _claim(job)}}]
    mounts: list[dict[str, Any]] = [{"name": "output", "mountPath": job.output}]
    if not _host_ipc(job):
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", **size}})
        mounts.append({"name": "shm", "mountPath": SHM})
    for index, mount in enumerate(job.mounts):
        volumes.append({"name": f"mount-{index}", "hostPath": {"path": mount.source, "type": "Directory"}})
        mounts.append({"name": f"mount-{index}", "mountPath": mount.target, "readOnly": mount.read_only})
    return volumes, mounts


def _literal(text: str) -> str:
    """Escape $(NAME), so that Kubernetes does not expand it."""
    return text.replace("$", "$$")


def _secret(job: Job) -> str:
    return f"{job.name}-secrets"


def _claim(job: Job) -> str:
    return f"{job.name}-output"


def _unrequested(manifest: Manifest) -> list[str]:
    """Return which of CPU and memory the pods do not request. A limit is a request, too."""
    spec = manifest["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"] if manifest["kind"] == "JobSet" else spec
    (resources,) = [c.get("resources", {}) for c in job["template"]["spec"]["containers"] if c["name"] == "node"]
    return [name for name in _OF_THE_JOB if not any(name in resources.get(kind, {}) for kind in ("limits", "requests"))]


def text(plan: ClusterPlan, target: PodTarget, manifests: Sequence[Manifest]) -> str:
    """Return the manifests as YAML, with a comment on prerequisites."""
    claim = _claim(plan.job) + (" (ReadWriteMany)" if plan.nodes > 1 else "")
    head = [
        f"# Job {plan.job.name}. Create these before `kubectl apply -f`:",
        f"#   the persistent volume claim {claim}, writable by all pods: checkpoints and logs are written",
        f"#   to its folder {target.run}, which is specific to this export and kept across restarts",
    ]
    if plan.job.secrets:
        keys = ", ".join(secret.name for secret in plan.job.secrets)
        head.append(f"#   the secret {_secret(plan.job)} with the keys {keys}")
    if why := not_restricted(plan.job):
        head.append(f"# A namespace with the Pod Security level restricted rejects the pods: {why}")
    if missing := _unrequested(manifests[-1]):
        head.append(
            f"# The pods request no {' and no '.join(missing)}, so Kubernetes may start them on a busy machine and"
        )
        keys = " and ".join(f"resources.{_OF_THE_JOB[name]}" for name in missing)
        head.append(f"# evicts them first: set {keys} of the job")
    texts = [yaml.dump(made, Dumper=_ManifestDumper, sort_keys=False, width=math.inf) for made in manifests]
    return "\n".join(head) + "\n" + "---\n".join(texts)
