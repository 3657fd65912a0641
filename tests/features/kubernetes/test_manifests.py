"""Manifests as Kubernetes reads them: with kubectl's client, and by the published rules of Pod Security."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import ValidationError

from launcher.errors import UsageError
from launcher.features.kubernetes import manifests as kubernetes
from launcher.job.models import Job
from launcher.job.settings import Settings
from launcher.planning.cluster import ClusterPlan, build
from tests.bed.fixtures import unavailable
from tests.bed.settings import BedUnavailable
from tests.exported import COMMAND, GPU
from tests.features.kubernetes.test_text import CLOUD, JOBSET, TARGET, manifests
from tests.slurm.bed import install
from tests.unit.test_job_properties import jobs

ORDINARY = [
    "1e-4",
    "1e3",
    "y",
    "n",
    "0x10",
    "0o7",
    "010",
    "1_000",
    "on",
    "null",
    "~",
    "",
    "12:30",
    "=",
    "\u0085 \U0001f600",
]
RESTRICTED = {**GPU, "mounts": {}}


@pytest.fixture(scope="module")
def kubectl() -> None:
    try:
        install(("kubernetes-client",), ("kubectl",), allowed=bool(os.environ.get("LAUNCHER_BED_REQUIRED")))
    except BedUnavailable as error:
        unavailable(str(error))


def read_by_kubectl(text: str, folder: Path) -> list[dict[str, Any]]:
    """Return every manifest of a text, parsed by Go's YAML, without the label that makes kubectl read them offline."""
    (folder / "manifests.yaml").write_text(text)
    argv = ["kubectl", "label", "--local", "-f", str(folder / "manifests.yaml"), "read=yes", "-o", "json"]
    shown = subprocess.run(argv, env={**os.environ, "HOME": str(folder)}, capture_output=True, text=True, check=True)
    decoder, rest, found = json.JSONDecoder(), shown.stdout.strip(), []
    while rest:
        made, end = decoder.raw_decode(rest)
        found.append(made)
        rest = rest[end:].strip()
    for made in found:
        assert made["metadata"]["labels"].pop("read") == "yes"
    return found


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    found = manifest["spec"]
    if manifest["kind"] == "JobSet":
        found = found["replicatedJobs"][0]["template"]["spec"]
    made: dict[str, Any] = found["template"]["spec"]
    return made


def test_ordinary_values_reach_kubernetes_unchanged(kubectl: None, tmp_path: Path) -> None:
    arguments = [*ORDINARY, "$$(a)"]
    env = {f"V{index}": argument for index, argument in enumerate(arguments)}
    data = {**COMMAND, "run": {"command": ["echo", *arguments]}, "env": env}
    (made,) = read_by_kubectl(manifests(data, jobset=True), tmp_path)
    (container,) = pod(made)["containers"]
    assert container["args"] == ["echo", *(argument.replace("$", "$$") for argument in arguments)]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert {name: values[name] for name in env} == {name: argument.replace("$", "$$") for name, argument in env.items()}


def acceptable(data: dict[str, Any]) -> dict[str, Any]:
    """Return the generated job without keys that Kubernetes does not support."""
    name = f"a{data['name']}"[:40].rstrip("-")
    nodes = [entry if isinstance(entry, str) else entry["host"] for entry in data["nodes"]]
    gpus = len(data["gpus"]) if isinstance(data["gpus"], (list, str)) else data["gpus"]
    docker = {key: value for key, value in data["docker"].items() if key != "devices"}
    return {**data, "name": name, "nodes": nodes, "gpus": gpus, "docker": docker, "image": {"ref": "a"}, "sweep": []}


@pytest.fixture(scope="module")
def generated() -> list[ClusterPlan]:
    """Return the plans of 100 jobs."""
    made: list[ClusterPlan] = []

    @settings(max_examples=100, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(jobs())
    def collect(data: dict[str, Any]) -> None:
        loaded = Job.model_validate(acceptable(data))
        kubernetes.check(loaded, jobset=True, image="r/x")
        made.append(build(loaded, "python3"))

    collect()
    assert len(made) >= 100
    return made


def test_generated_jobs_are_read_correctly(generated: list[ClusterPlan], kubectl: None, tmp_path: Path) -> None:
    meant = [kubernetes.jobset(plan, TARGET) for plan in generated]
    texts = [kubernetes.text(plan, TARGET, made) for plan, made in zip(generated, meant, strict=True)]
    assert read_by_kubectl("---\n".join(texts), tmp_path) == [made for manifests in meant for made in manifests]


def test_the_manifests_of_generated_jobs_are_accepted_by_strict_schemas(generated: list[ClusterPlan]) -> None:
    """Many Jobs in one list, as each validation loads all schemas of Kubernetes."""
    jobs_, services, validator = [], [], jsonschema.Draft202012Validator(JOBSET)
    for plan in generated:
        (made,) = kubernetes.jobset(plan, TARGET)
        validator.validate(made)
        of_set = made["spec"]["replicatedJobs"][0]["template"]
        jobs_.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": made["metadata"], **of_set})
        service, alone = kubernetes.indexed_job(plan, TARGET)
        services.append(service)
        jobs_.append(alone)
    kubernetes_validate.validate({"apiVersion": "batch/v1", "kind": "JobList", "items": jobs_}, "1.37", strict=True)
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "ServiceList", "items": services}, "1.37", strict=True)


def forbidden(spec: dict[str, Any]) -> Iterator[str]:
    """The published Pod Security Standards "restricted", for the fields that an exported manifest can contain."""
    context = spec.get("securityContext", {})
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(key):
            yield key
    for volume in spec.get("volumes", ()):
        allowed = {
            "configMap",
            "csi",
            "downwardAPI",
            "emptyDir",
            "ephemeral",
            "persistentVolumeClaim",
            "projected",
            "secret",
        }
        if not set(volume) - {"name"} <= allowed:
            yield "volumes"
    for container in spec["containers"]:
        own = container.get("securityContext", {})
        effective = {**context, **own}
        if own.get("allowPrivilegeEscalation") is not False:
            yield "allowPrivilegeEscalation"
        if effective.get("runAsNonRoot") is not True or effective.get("runAsUser") == 0:
            yield "runAsNonRoot"
        if effective.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield "seccompProfile"
        capabilities = own.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", ()) or set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
            yield "capabilities"
        if own.get("privileged") or any("hostPort" in port for port in container.get("ports", ())):
            yield "privileged"


def made_of(data: dict[str, Any], *, jobset: bool = True, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = [*yaml.safe_load_all(manifests(data, jobset=jobset, **more))][-1]
    return found


def test_a_restricted_namespace_accepts_the_pods_which_can_write_to_the_claim() -> None:
    for data in (RESTRICTED, COMMAND):
        found = pod(made_of(data))
        assert not [*forbidden(found)]
        assert found["securityContext"]["fsGroup"] == found["securityContext"]["runAsUser"]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"mounts": {"/a": "/b"}}, "hostPath"),
        ({"docker": {"cap_add": ["SYS_PTRACE"]}}, "cap_add"),
        ({"docker": {"ipc": "host"}}, "ipc"),
    ],
)
def test_reasons_of_a_restricted_namespace_are_listed(keys: dict[str, Any], why: str) -> None:
    text = manifests({**RESTRICTED, **keys}, jobset=True)
    (line,) = [line for line in text.splitlines() if "restricted" in line]
    assert why in line
    found = pod(yaml.safe_load(text))
    assert [*forbidden(found)]
    assert found["securityContext"] == {"fsGroup": 1000}  # the image's user can write to the claim


def test_a_capability_has_the_name_that_kubernetes_uses() -> None:
    """Kubernetes omits the prefix CAP_; docker accepts both forms."""
    (container,) = pod(made_of({**RESTRICTED, "docker": {"cap_add": ["CAP_SYS_PTRACE", "IPC_LOCK"]}}))["containers"]
    assert container["securityContext"]["capabilities"]["add"] == ["SYS_PTRACE", "IPC_LOCK"]


def test_ipc_host_is_used_if_the_job_requests_it() -> None:
    asked, default = (pod(made_of({**RESTRICTED, **keys})) for keys in ({"docker": {"ipc": "host"}}, {}))
    assert asked["hostIPC"] is True
    assert "shm" not in [volume["name"] for volume in asked["volumes"]]
    assert "hostIPC" not in default


def test_the_time_limit_ends_the_set_permanently_and_excludes_the_wait_for_machines(tmp_path: Path) -> None:
    made = made_of({**RESTRICTED, "timeout": "2s"})
    late, drained = made["spec"]["failurePolicy"]["rules"]
    assert (late["action"], drained["action"]) == ("FailJobSet", "RestartJobSetAndIgnoreMaxRestarts")
    (pattern,) = late["onJobFailureMessagePatterns"]
    message = "{} matching FailJob rule at index 0"  # message of the Job controller
    assert re.search(pattern, message.format("Container node for pod a/b failed with exit code 124"))
    assert not re.search(pattern, message.format("Pod a/b has condition DisruptionTarget"))
    job = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert "activeDeadlineSeconds" not in job
    late, _ = job["podFailurePolicy"]["rules"]
    (container,) = pod(made)["containers"]
    env = {"PATH": os.environ["PATH"], "MASTER_ADDR": "localhost", "LAUNCHER_TIMEOUT": "1", "LAUNCHER_NODE": "node-0"}
    for _ in range(2):  # the second start is a restart: its time is over before it begins
        argv = [*container["command"], "sh", "-c", f"echo . >>{tmp_path}/ran; sleep 30"]
        done = subprocess.run(argv, env={**env, "LAUNCHER_OUTPUT": str(tmp_path)}, timeout=20, check=False)
        assert [done.returncode] == late["onExitCodes"]["values"]
    assert (tmp_path / "ran").read_text() == ".\n"


@pytest.mark.parametrize(("limit", "code"), [(1, 124), (600, 137)])
def test_a_program_that_ignores_sigterm_at_its_time_limit_is_not_restarted(
    limit: int, code: int, tmp_path: Path
) -> None:
    """`timeout` exits with 137 if its SIGKILL ends the program, half a minute later; so does an out-of-memory kill."""
    (container,) = pod(made_of({**RESTRICTED, "timeout": "2s"}))["containers"]
    (tmp_path / "timeout").write_text("#!/bin/sh\nsleep 1.1; exit 137\n")
    (tmp_path / "timeout").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_ADDR": "localhost", "LAUNCHER_NODE": "node-0"}
    env |= {"LAUNCHER_TIMEOUT": str(limit), "LAUNCHER_OUTPUT": str(tmp_path)}
    assert subprocess.run([*container["command"], "true"], env=env, timeout=20, check=False).returncode == code


DRAINED = [{"type": "DisruptionTarget", "status": "True"}]  # a JobSet's schema has no default for the status


def test_a_drained_pod_restarts_the_set_without_counting_and_a_job_replaces_it() -> None:
    made = made_of(RESTRICTED)
    (rule,) = made["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    policy = made["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]
    assert policy["rules"] == [{"action": "FailJob", "onPodConditions": DRAINED}]
    alone = made_of(COMMAND, jobset=False)["spec"]["podFailurePolicy"]
    assert alone["rules"] == [{"action": "Ignore", "onPodConditions": DRAINED}]


def test_the_peers_of_a_drained_pod_end_after_it(tmp_path: Path) -> None:
    """A failed pod waits; a pod that is stopped does not, and its program has time for a checkpoint."""
    (container,) = pod(made_of(RESTRICTED))["containers"]
    env = {"PATH": os.environ["PATH"], "MASTER_ADDR": "localhost", "LAUNCHER_OUTPUT": str(tmp_path)}
    assert {one["name"]: one.get("value") for one in container["env"]}["LAUNCHER_LATE"] == "10"
    began = time.monotonic()
    late = {**env, "LAUNCHER_LATE": "0.4"}
    assert subprocess.run([*container["command"], "sh", "-c", "exit 7"], env=late, check=False).returncode == 7
    assert time.monotonic() - began > 0.4
    script = "trap 'sleep 0.2; echo saved; exit 1' TERM; echo ready; while :; do sleep 0.05; done"
    argv = [*container["command"], "sh", "-c", script]
    with subprocess.Popen(argv, env={**env, "LAUNCHER_LATE": "60"}, stdout=subprocess.PIPE, text=True) as terminated:
        assert terminated.stdout
        assert terminated.stdout.readline() == "ready\n"
        terminated.terminate()
        assert terminated.stdout.readline() == "saved\n"
        assert terminated.wait(20) == 1


def test_an_output_that_cannot_be_written_ends_the_pod(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (container,) = pod(made_of(RESTRICTED))["containers"]
    env = {"PATH": os.environ["PATH"], "MASTER_ADDR": "localhost", "LAUNCHER_OUTPUT": str(tmp_path / "file")}
    done = subprocess.run([*container["command"], "echo", "ran"], env=env, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (73, b"")


def test_what_the_program_writes_beside_its_code_is_in_the_claim_also_after_a_restart(tmp_path: Path) -> None:
    (container,) = pod(made_of(RESTRICTED))["containers"]
    code, output = tmp_path / "code", tmp_path / "output"
    code.mkdir()
    (code / "lr").write_text("1")
    argv = [text.replace(container["workingDir"], str(code)) for text in container["command"]]
    env = {"PATH": os.environ["PATH"], "MASTER_ADDR": "localhost", "LAUNCHER_OUTPUT": str(output), "LAUNCHER_NODE": "n"}
    for lr in ("1", "12"):
        program = f"cat lr | grep -qx {lr} && printf 2 >>lr"
        subprocess.run([*argv, "sh", "-c", program], env=env, cwd=code, check=True)
    assert (output / "workdir" / "n" / "lr").read_text() == "122"
    assert (code / "lr").read_text() == "1"


def test_every_export_has_its_own_folder_in_the_claim() -> None:
    (container,) = pod(made_of(RESTRICTED))["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert env["LAUNCHER_OUTPUT"] == f"/output/{TARGET.run}"
    assert env["LAUNCHER_RUN"] == TARGET.run


def test_the_clusters_settings_are_merged_into_the_manifest() -> None:
    made = made_of(RESTRICTED, settings=CLOUD)
    assert made["metadata"]["namespace"] == "team"
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    found = pod(made)
    (container,) = found["containers"]
    assert found["securityContext"]["runAsUser"] == 2000
    assert found["securityContext"]["runAsNonRoot"] is True
    assert found["serviceAccountName"] == "trainer"
    assert container["resources"]["limits"]["rdma/hca"] == "1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert container["resources"]["requests"]["memory"] == str(64 << 30)
    assert found["terminationGracePeriodSeconds"] == 45


@pytest.mark.parametrize("jobset", [True, False])
def test_labels_and_annotations_are_those_of_the_objects_and_of_their_pods(jobset: bool) -> None:
    """Kueue reads the priority class of the set or Job and the topology of the pods, other schedulers those of pods."""
    made = [*yaml.safe_load_all(manifests(COMMAND, jobset=jobset, settings=CLOUD))]
    job = made[-1]["spec"]["replicatedJobs"][0]["template"] if jobset else made[-1]
    for metadata in (*(one["metadata"] for one in made), job["spec"]["template"]["metadata"]):
        assert metadata["labels"].items() >= CLOUD.labels.items()
        assert metadata["annotations"] == CLOUD.annotations
    assert "kueue.x-k8s.io/queue-name" not in job["spec"]["template"]["metadata"]["labels"]  # pods of a Job are its own
    assert made[-1]["spec"]["ttlSecondsAfterFinished"] == 86400
    if jobset:
        jsonschema.validate(made[-1], JOBSET)
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": made[-1]["metadata"], "spec": job["spec"]}
    kubernetes_validate.validate(job, "1.37", strict=True)
    for other in made[:-1]:
        kubernetes_validate.validate(other, "1.37", strict=True)


@pytest.mark.parametrize(
    "wrong", [{"labels": {"a b": "c"}}, {"labels": {"team": "a b"}}, {"labels": {"n": 7}}, {"annotations": {"/x": ""}}]
)
def test_a_label_that_kubernetes_would_reject_is_an_error_of_the_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate({"clusters": {"k8s": {"kind": "kubernetes", **wrong}}})


@pytest.mark.parametrize(
    ("resources", "pod", "said"),
    [
        ({}, {}, "no cpu and no memory"),
        ({"cpus": 4}, {}, "no memory"),
        ({"cpus": 4, "memory": "8g"}, {}, ""),
        ({}, {"containers": [{"name": "node", "resources": {"requests": {"cpu": "1", "memory": "1G"}}}]}, ""),
        ({}, {"containers": [{"name": "other", "resources": {"limits": {"cpu": "1", "memory": "1G"}}}]}, "no cpu and"),
    ],
)
@pytest.mark.parametrize("jobset", [True, False])
def test_the_first_lines_say_which_requests_are_not_made(
    resources: dict[str, Any], pod: dict[str, Any], said: str, jobset: bool
) -> None:
    text = manifests({**COMMAND, "resources": resources}, jobset=jobset, settings=CLOUD.model_copy(update={"pod": pod}))
    head = text.partition("apiVersion")[0]
    assert ("request no" in head) == bool(said)
    assert said in head


def test_a_folder_that_a_machine_lacks_is_not_created_there() -> None:
    made = made_of(GPU)
    kinds = [volume["hostPath"]["type"] for volume in pod(made)["volumes"] if "hostPath" in volume]
    assert kinds == ["Directory", "Directory"]
    file = CLOUD.model_copy(update={"pod": {"volumes": [{"name": "mount-0", "hostPath": {"type": "File"}}]}})
    volumes = {volume["name"]: volume for volume in pod(made_of(GPU, settings=file))["volumes"]}
    assert volumes["mount-0"]["hostPath"] == {"path": "/data/imagenet", "type": "File"}


@pytest.mark.parametrize(("nodes", "named"), [(1, False), (2, True)])
def test_the_access_mode_of_the_claim_is_named(nodes: int, named: bool) -> None:
    text = manifests({**COMMAND, "nodes": nodes}, jobset=True)
    assert ("claim any-output (ReadWriteMany)" in text) == named


def test_a_kubernetes_cluster_is_only_for_export() -> None:
    hpc = {"kind": "slurm", "login": "local", "workdir": "/shared"}
    known = Settings.model_validate({"clusters": {"k8s": {"kind": "kubernetes", "namespace": "team"}, "hpc": hpc}})
    assert known.kubernetes("k8s").namespace == "team"
    with pytest.raises(UsageError, match=r"(?s)only writes manifests.*export JOB --to jobset --on k8s"):
        known.cluster("k8s")
    with pytest.raises(UsageError, match="is a Slurm cluster"):
        known.kubernetes("hpc")
