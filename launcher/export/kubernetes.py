"""ClusterPlan -> Kubernetes manifests: a JobSet (v1alpha2), or an Indexed Job and a headless Service.

The image has the code (`--image`), the output goes to a claim, secrets are references. The ranks meet at the first
pod's DNS name, which comes later than the pods: each waits for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from launcher.errors import UsageError
from launcher.job.models import Job
from launcher.job.parts import ClusterOptions
from launcher.job.settings import Kubernetes
from launcher.model.container import CODE
from launcher.model.plan import RunId
from launcher.planning import command
from launcher.planning.cluster import ClusterPlan, Refused

Manifest = dict[str, Any]
SHM = "/dev/shm"  # noqa: S108 - the pod's
ANY = Kubernetes(kind="kubernetes")  # no cluster is named: nothing is known of it
_LONGEST = 63  # of a pod's name, which is the job's and a number, and of its host name
_RANDOM = "-abcde"  # ends a pod's name
_UID = 1000  # with which pods run that need no root; `pod` of the settings changes it
_GRACE = 45  # seconds from SIGTERM to SIGKILL, as of `launcher down`
_LATE = 10  # seconds by which a pod that has failed ends later than its program
_FAILED_WRITE, _TIMEOUT = 73, 124  # exit codes, as of the entry script on other nodes
_RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# getent is glibc's and musl's, nslookup busybox's. After ten minutes the program itself says what it does not find.
_WAIT = f"""\
tries=0
until getent hosts "$MASTER_ADDR" >/dev/null 2>&1 || nslookup "$MASTER_ADDR" >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 600 ] || break
    sleep 1
done
mkdir -p "$LAUNCHER_OUTPUT/errors" "$LAUNCHER_OUTPUT/state" || exit {_FAILED_WRITE}
if [ -n "$LAUNCHER_TIMEOUT" ]; then # since the first start of this node, over restarts
    began=$LAUNCHER_OUTPUT/state/$LAUNCHER_NODE.began
    [ -s "$began" ] || date +%s >"$began" || exit {_FAILED_WRITE}
    left=$((LAUNCHER_TIMEOUT - $(date +%s) + $(cat "$began")))
    [ $left -gt 0 ] || exit {_TIMEOUT}
    set -- timeout -k 30 $left "$@"
fi
child='' told=''
trap 'told=yes; [ -z "$child" ] || kill -s TERM "$child" 2>/dev/null' TERM
"$@" <&0 &
child=$!
[ -z "$told" ] || kill -s TERM "$child"
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do # a signal ends `wait`, not the program
    wait "$child"
    code=$?
done
if [ "$code" -eq 137 ] && [ -n "$LAUNCHER_TIMEOUT" ] &&
    [ $(($(date +%s) - $(cat "$began"))) -ge "$LAUNCHER_TIMEOUT" ]; then
    code={_TIMEOUT} # it did not end by SIGTERM
fi
# The peers of a pod that is drained fail with it: its own end has to be seen first, which is not counted as a restart.
case $code$told in
    0 | {_TIMEOUT} | *yes) ;;
    *) sleep "${{LAUNCHER_LATE:-0}}" ;;
esac
exit "$code"
"""
_PLAIN = re.compile("[A-Za-z]{3}[A-Za-z0-9./-]*")  # a key that no reader takes for a number
_WORDS = ("yes", "off", "true", "false", "null", "nan", "inf")  # ... or for one of these


class _Dumper(yaml.SafeDumper):
    """Quotes every text: PyYAML leaves 1e-4 and y without quotes, which Go, its reader, takes for other types."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", str(data), style="|" if data == _WAIT else '"')

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        for key, _ in node.value:
            if _PLAIN.fullmatch(key.value) and key.value.lower() not in _WORDS:
                key.style = None
        return node


_Dumper.add_representer(str, _Dumper.represent_str)


def check(job: Job, *, jobset: bool, image: str | None) -> None:
    """Raises JobInvalid with every key that such a manifest cannot carry, UsageError without an image."""
    job.refuse(_refused(job, jobset=jobset))
    if not image:
        what = "needed: pods get the code with their image, at " + CODE
        raise UsageError("--image", what, "build one with the code, push it, and name it: --image REGISTRY/NAME:TAG")


def _refused(job: Job, *, jobset: bool) -> Refused:
    if job.runtime == "process":
        yield ("runtime",), "pods are containers: expected docker"
    longest = _LONGEST - len(_pod_name("", len(job.nodes) - 1, jobset=jobset) + _RANDOM)
    if not re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", job.name) or len(job.name) > longest:
        what = "as a DNS name it begins with a letter, ends with a letter or digit, and has at most"
        yield ("name",), f"{what} {longest} characters, as its pods are called {job.name}-..."
    if job.cluster != ClusterOptions():
        yield ("cluster",), "is what Slurm is asked for: leave it out"
    if job.hang_timeout is not None:
        yield ("hang_timeout",), "Kubernetes does not notice a hang: leave it out"
    if job.restarts and not jobset and job.min_nodes is None:  # min_nodes has restarts, and is refused itself
        yield ("restarts",), "a Job restarts single pods, not the run: --to jobset"
    if job.docker.ipc not in ("host", "private"):
        yield ("docker", "ipc"), "pods have a /dev/shm of their own: expected host or private"
    for name, ip in job.docker.extra_hosts.items():
        if ip == "host-gateway":
            yield ("docker", "extra_hosts", name), "pods know no host-gateway: give an IP address"
        if not re.fullmatch("[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name):
            yield ("docker", "extra_hosts", name), "the host names of pods have small letters, digits, - and . only"
    for mount in job.mounts:
        if mount.target == SHM:
            yield ("mounts", mount.source), f"pods have a {SHM} of their own: leave it out"


def _pod_name(job: str, index: int, *, jobset: bool) -> str:
    """Without what makes it unique; its host name."""
    return f"{job}-node-0-{index}" if jobset else f"{job}-{index}"


@dataclass(frozen=True)
class Target:
    """What a manifest needs beside the plan. run: names the folder in the claim; one for each export."""

    image: str
    run: RunId
    settings: Kubernetes


def jobset(plan: ClusterPlan, target: Target) -> list[Manifest]:
    """One manifest. The run is restarted as a whole."""
    name = plan.job.name
    pods = {"spec": _job_spec(plan, target, f"{_pod_name(name, 0, jobset=True)}.{name}", drained="FailJob")}
    by_policy = ["PodFailurePolicy"]  # of _job_spec; any other failure counts as a restart
    rules = [{"name": "drained", "action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": by_policy}]
    if plan.job.timeout is not None:  # which is for all of its starts together
        ended = {"onJobFailureReasons": by_policy, "onJobFailureMessagePatterns": [f"exit code {_TIMEOUT} "]}
        rules.insert(0, {"name": "timelimit", "action": "FailJobSet", **ended})  # the patterns need JobSet 0.10
    failure = {"maxRestarts": plan.job.restarts, "rules": rules}
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": failure,
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": pods}],
    }
    metadata = _named(name, target.settings, queued=True)
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}]


def indexed_job(plan: ClusterPlan, target: Target) -> list[Manifest]:
    """Two manifests: the Service that gives the pods their names, and the Job."""
    name, settings = plan.job.name, target.settings
    spec = _job_spec(plan, target, f"{_pod_name(name, 0, jobset=False)}.{name}", drained="Ignore")
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
    return {"name": job, **namespace, "labels": {"app.kubernetes.io/managed-by": "launcher", **queue}}


def _job_spec(plan: ClusterPlan, target: Target, master: str, *, drained: str) -> dict[str, Any]:
    """A failed pod is not replaced: its peers have lost it, so the run ends, or is restarted as a whole.

    drained: what follows where a drain or a preemption has ended a pod. FailJob: the set is restarted, which is not
    counted. Ignore: a Job alone can only replace the pod.
    """
    rules: list[dict[str, Any]] = []
    if plan.job.timeout is not None:
        codes = {"containerName": "node", "operator": "In", "values": [_TIMEOUT]}
        rules.append({"action": "FailJob", "onExitCodes": codes})
    rules.append({"action": drained, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]})
    return {
        "completionMode": "Indexed",
        "completions": plan.nodes,
        "parallelism": plan.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": _merged(_pod(plan, target, master), target.settings.pod)},
    }


def not_restricted(job: Job) -> str:
    """Why a namespace with the Pod Security level "restricted" refuses the pods; "" where it takes them."""
    why = ["mounts are folders of the machine (hostPath)"] if job.mounts else []
    why += ["docker.cap_add"] if job.docker.cap_add else []
    why += ["docker.ipc: host"] if _host_ipc(job) else []
    return ", ".join(why)


def _host_ipc(job: Job) -> bool:
    """Where the job file says so: by default a pod has a /dev/shm of its own."""
    return job.docker.ipc == "host" and "ipc" in job.docker.model_fields_set


def _merged(ours: Any, given: Any) -> Any:
    """Mappings key by key, lists of named things by their names, other lists one after the other."""
    if isinstance(ours, dict) and isinstance(given, Mapping):
        return ours | {key: _merged(ours[key], value) if key in ours else value for key, value in given.items()}
    if not isinstance(ours, list) or not isinstance(given, (list, tuple)):
        return given
    made = [*ours]
    names = [one.get("name") if isinstance(one, dict) else None for one in ours]
    for one in given:
        name = one.get("name") if isinstance(one, Mapping) else None
        if name is None or name not in names:
            made.append(one)
        else:
            made[names.index(name)] = _merged(made[names.index(name)], one)
    return made


def _pod(plan: ClusterPlan, target: Target, master: str) -> dict[str, Any]:
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
    else:  # as the image's user, who may write the claim by its group
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
    program = [_literal(word) for word in plan.program]
    if not plan.torchrun:
        return program
    address, port, run = "$(MASTER_ADDR)", "$(MASTER_PORT)", "$(LAUNCHER_RUN)"
    options = command.torchrun_options(plan.nodes, "$(LAUNCHER_NODE_RANK)", plan.processes, address, port, run)
    return ["python3", "-m", "torch.distributed.run", *options, "--no_python", *program]


def _env(plan: ClusterPlan, run: RunId, master: str) -> list[dict[str, Any]]:
    """Ours first: $(NAME) stands for a variable that is above. The job's are over ours."""
    rank = "LAUNCHER_NODE_RANK"
    ours = {
        "LAUNCHER_RUN": run,
        "LAUNCHER_NODE": f"node-$({rank})",
        "LAUNCHER_OUTPUT": f"{_literal(plan.job.output)}/{run}",
        "TORCHELASTIC_ERROR_FILE": f"$(LAUNCHER_OUTPUT)/errors/node-$({rank}).json",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(plan.job.port),
    }
    if plan.nodes > 1:
        ours["LAUNCHER_LATE"] = str(_LATE)
    if plan.job.timeout is not None:
        ours["LAUNCHER_TIMEOUT"] = str(plan.job.timeout)
    if not not_restricted(plan.job):  # a user that the image does not know: it has no home, and no name
        ours |= {"HOME": "/tmp", "USER": "launcher"}  # noqa: S108 - the pod's
    if not plan.torchrun:
        ours |= command.bare(master, plan.job.port, nodes=plan.nodes, rank=f"$({rank})")
    ours |= {name: _literal(value) for name, value in plan.env.items()}
    found: list[dict[str, Any]] = [{"name": rank, "valueFrom": {"fieldRef": {"fieldPath": _RANK}}}]
    found += [{"name": name, "value": value} for name, value in ours.items()]
    for secret in plan.job.secrets:
        reference = {"name": _secret(plan.job), "key": secret.name}
        found.append({"name": secret.name, "valueFrom": {"secretKeyRef": reference}})
    return found


def _volumes(job: Job) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A pod's own /dev/shm has 64 MB, too little for data loaders: it gets one in memory."""
    size = {} if job.resources.shm is None else {"sizeLimit": str(job.resources.shm)}
    volumes: list[dict[str, Any]] = [{"name": "output", "persistentVolumeClaim": {"claimName": _claim(job)}}]
    mounts: list[dict[str, Any]] = [{"name": "output", "mountPath": job.output}]
    if not _host_ipc(job):
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", **size}})
        mounts.append({"name": "shm", "mountPath": SHM})
    for place, mount in enumerate(job.mounts):
        volumes.append({"name": f"mount-{place}", "hostPath": {"path": mount.source}})
        mounts.append({"name": f"mount-{place}", "mountPath": mount.target, "readOnly": mount.read_only})
    return volumes, mounts


def _literal(text: str) -> str:
    """So that Kubernetes takes $(NAME) in it as it is."""
    return text.replace("$", "$$")


def _secret(job: Job) -> str:
    return f"{job.name}-secrets"


def _claim(job: Job) -> str:
    return f"{job.name}-output"


def text(plan: ClusterPlan, target: Target, manifests: Sequence[Manifest]) -> str:
    """As YAML, with a comment on what must be there first."""
    head = [
        f"# The job {plan.job.name}. What must be there before `kubectl apply -f`:",
        f"#   the claim {_claim(plan.job)}, which all of its pods may write: checkpoints and logs go there,",
        f"#   to {target.run}, a folder of this export's own, which stays over restarts",
    ]
    if plan.job.secrets:
        keys = ", ".join(secret.name for secret in plan.job.secrets)
        head.append(f"#   the secret {_secret(plan.job)} with the keys {keys}")
    if why := not_restricted(plan.job):
        head.append(f"# A namespace with the Pod Security level restricted refuses its pods: {why}")
    texts = [yaml.dump(made, Dumper=_Dumper, sort_keys=False, width=math.inf) for made in manifests]
    return "\n".join(head) + "\n" + "---\n".join(texts)
