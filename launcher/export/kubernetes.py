"""ClusterPlan -> Kubernetes manifests: a JobSet (v1alpha2), or an Indexed Job and a headless Service.

The image has the code (`--image`), the output goes to a claim, secrets are references. The ranks meet at the first
pod's DNS name, which comes later than the pods: each waits for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from launcher.errors import UsageError
from launcher.job.models import ClusterOptions, Job
from launcher.model.container import CODE
from launcher.planning import command
from launcher.planning.cluster import ClusterPlan, Refused

Manifest = dict[str, Any]
LONGEST_NAME = 50  # a pod's name, its host name, is longer by -node-0-9999 and at most 63
SHM = "/dev/shm"  # noqa: S108 - the pod's
_RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# getent is glibc's and musl's, nslookup busybox's. After ten minutes the program itself says what it does not find.
_WAIT = """\
tries=0
until getent hosts "$MASTER_ADDR" >/dev/null 2>&1 || nslookup "$MASTER_ADDR" >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 600 ] || break
    sleep 1
done
mkdir -p "$LAUNCHER_OUTPUT/errors"
exec "$@"
"""


class _Dumper(yaml.SafeDumper):
    """Shows a script as its lines."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if data == _WAIT else None)


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
    if not re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", job.name) or len(job.name) > LONGEST_NAME:
        what = "as a DNS name it begins with a letter, ends with a letter or digit, and has at most"
        yield ("name",), f"{what} {LONGEST_NAME} characters"
    if job.cluster != ClusterOptions():
        yield ("cluster",), "is what Slurm is asked for: leave it out"
    if job.hang_timeout is not None:
        yield ("hang_timeout",), "Kubernetes does not notice a hang: leave it out"
    if job.restarts and not jobset and job.min_nodes is None:  # min_nodes has restarts, and is refused itself
        yield ("restarts",), "a Job restarts single pods, not the run: --to jobset"
    if job.docker.ipc not in ("host", "private"):
        yield ("docker", "ipc"), "pods have a /dev/shm of their own: expected host or private"
    for mount in job.mounts:
        if mount.target == SHM:
            yield ("mounts", mount.source), f"pods have a {SHM} of their own: leave it out"


def jobset(plan: ClusterPlan, image: str) -> list[Manifest]:
    """One manifest. The run is restarted as a whole."""
    name = plan.job.name
    pods = {"spec": _job_spec(plan, image, f"{name}-node-0-0.{name}")}
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": plan.job.restarts},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": pods}],
    }
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _named(name), "spec": spec}]


def indexed_job(plan: ClusterPlan, image: str) -> list[Manifest]:
    """Two manifests: the Service that gives the pods their names, and the Job."""
    name = plan.job.name
    spec = _job_spec(plan, image, f"{name}-0.{name}")
    spec["template"]["spec"]["subdomain"] = name
    port = {"name": "rendezvous", "port": plan.job.port}
    selector = {"batch.kubernetes.io/job-name": name}
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": [port]}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": _named(name), "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": _named(name), "spec": spec},
    ]


def _named(job: str) -> dict[str, Any]:
    return {"name": job, "labels": {"app.kubernetes.io/managed-by": "launcher"}}


def _job_spec(plan: ClusterPlan, image: str, master: str) -> dict[str, Any]:
    """A failed pod is not replaced: its peers have lost it, so the run ends, or is restarted as a whole."""
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": plan.nodes,
        "parallelism": plan.nodes,
        "backoffLimit": 0,
        "template": {"spec": _pod(plan, image, master)},
    }
    if plan.job.timeout is not None:
        spec["activeDeadlineSeconds"] = plan.job.timeout
    return spec


def _pod(plan: ClusterPlan, image: str, master: str) -> dict[str, Any]:
    resources, docker = plan.job.resources, plan.job.docker
    volumes, mounts = _volumes(plan.job)
    container: dict[str, Any] = {
        "name": "node",
        "image": image,
        "workingDir": CODE,
        "command": ["sh", "-c", _WAIT, "launcher"],
        "args": _arguments(plan),
        "env": _env(plan, master),
        "volumeMounts": mounts,
    }
    limits: dict[str, str] = {"nvidia.com/gpu": str(plan.gpus)} if plan.gpus else {}
    limits |= {} if resources.memory is None else {"memory": str(resources.memory)}
    limits |= {} if resources.cpus is None else {"cpu": f"{max(1, round(resources.cpus * 1000))}m"}
    if limits:
        container["resources"] = {"limits": limits}
    if docker.cap_add:
        container["securityContext"] = {"capabilities": {"add": list(docker.cap_add)}}
    pod: dict[str, Any] = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
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


def _env(plan: ClusterPlan, master: str) -> list[dict[str, Any]]:
    """Ours first: $(NAME) stands for a variable that is above. The job's are over ours."""
    rank = "LAUNCHER_NODE_RANK"
    ours = {
        "LAUNCHER_RUN": plan.job.name,
        "LAUNCHER_NODE": f"node-$({rank})",
        "LAUNCHER_OUTPUT": _literal(plan.job.output),
        "TORCHELASTIC_ERROR_FILE": f"$(LAUNCHER_OUTPUT)/errors/node-$({rank}).json",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(plan.job.port),
    }
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
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", **size}},
        {"name": "output", "persistentVolumeClaim": {"claimName": _claim(job)}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "shm", "mountPath": SHM},
        {"name": "output", "mountPath": job.output},
    ]
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


def text(plan: ClusterPlan, manifests: Sequence[Manifest]) -> str:
    """As YAML, with a comment on what must be there first."""
    head = [
        f"# The job {plan.job.name}. What must be there before `kubectl apply -f`:",
        f"#   the claim {_claim(plan.job)}, which all of its pods may write: checkpoints and logs go there",
    ]
    if plan.job.secrets:
        keys = ", ".join(secret.name for secret in plan.job.secrets)
        head.append(f"#   the secret {_secret(plan.job)} with the keys {keys}")
    texts = [yaml.dump(made, Dumper=_Dumper, sort_keys=False, width=120) for made in manifests]
    return "\n".join(head) + "\n" + "---\n".join(texts)
