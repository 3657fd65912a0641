"""Manifests, compared with golden files and with schemas, and the jobs that they refuse."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from launcher.errors import JobInvalid, UsageError
from launcher.features.kubernetes import manifests as kubernetes
from launcher.job.loader import load_job
from launcher.job.settings import Kubernetes
from launcher.planning.cluster import build
from tests.e2e.cli import ROOT, Cli
from tests.exported import COMMAND, CPU, GPU, job

GOLDEN = Path(__file__).parent / "golden"
TARGET = kubernetes.PodTarget("registry.example/train:1", "job-20260101-000000-abcd", kubernetes.ANY)


CLOUD = Kubernetes(
    kind="kubernetes",
    namespace="team",
    queue="gpus",
    service_account="trainer",
    pull_secrets=("registry",),
    labels={"team": "vision", "kueue.x-k8s.io/priority-class": "high"},
    annotations={"kueue.x-k8s.io/podset-required-topology": "cloud.provider.com/topology-block"},
    ttl=86400,
    pod={
        "nodeSelector": {"zone": "1"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "securityContext": {"runAsUser": 2000},
        "containers": [{"name": "node", "resources": {"limits": {"rdma/hca": "1"}}}],
    },
)


def manifests(data: dict[str, Any], *, jobset: bool, settings: Kubernetes = kubernetes.ANY) -> str:
    loaded, target = job(data), replace(TARGET, settings=settings)
    kubernetes.check(loaded, jobset=jobset, image=target.image)
    plan = build(loaded, "python3")
    made = (kubernetes.jobset if jobset else kubernetes.indexed_job)(plan, target)
    return kubernetes.text(plan, target, made)


TEXTS = {
    "imagenet.jobset.yaml": lambda: manifests(GPU, jobset=True),
    "any.job.yaml": lambda: manifests(COMMAND, jobset=False),
    "any.cloud.yaml": lambda: manifests({**COMMAND, "timeout": "1h"}, jobset=True, settings=CLOUD),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_export_equals_the_golden_file(name: str) -> None:
    text, golden = TEXTS[name](), GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def refused(data: dict[str, Any], /, *, jobset: bool, **keys: Any) -> str:
    with pytest.raises(JobInvalid) as caught:
        manifests({**data, **keys}, jobset=jobset)
    return str(caught.value)


@pytest.mark.parametrize(
    ("jobset", "data", "keys", "expected"),
    [
        (True, CPU, {}, "runtime: pods are containers"),
        (True, GPU, {"name": "0k"}, "name: must start with"),
        (True, GPU, {"name": "a" * 49}, "at most 48 characters"),
        (True, GPU, {"nodes": 10_000, "name": "a" * 46}, "at most 45 characters"),
        (True, GPU, {"cluster": {"partition": "gpu"}}, "cluster: contains options for Slurm"),
        (True, GPU, {"docker": {"ipc": "shareable"}}, "docker.ipc: each pod has its own /dev/shm"),
        (True, GPU, {"mounts": {"/a": "/dev/shm"}}, "mounts./a: each pod has"),
        (
            True,
            GPU,
            {"docker": {"extra_hosts": {"a": "host-gateway"}}},
            "extra_hosts.a: pods do not support host-gateway",
        ),
        (True, GPU, {"docker": {"extra_hosts": {"A_1": "::1"}}}, "extra_hosts.A_1: host names of pods"),
        (
            True,
            GPU,
            {"data": {"a": {"from": "h:/a", "at": "/a"}}},
            "data.a: pods get no copies of data: put it on a vol",
        ),
        (False, GPU, {}, "restarts: a Job restarts single pods"),
    ],
)
def test_unsupported_keys_are_refused_with_their_line(
    jobset: bool, data: dict[str, Any], keys: dict[str, Any], expected: str
) -> None:
    message = refused(data, jobset=jobset, **keys)
    assert message.startswith("job.yaml:"), message
    assert int(message.split(":")[1]) > 0
    assert expected in message


@pytest.fixture
def cloud(tmp_path: Path) -> Cli:
    """The launcher of a user with a cluster `k8s`."""
    (tmp_path / "launcher").mkdir()
    settings = tmp_path / "launcher" / "settings.yaml"
    settings.write_text("clusters: {k8s: {kind: kubernetes, gpus: 7}}")
    settings.chmod(0o600)
    return Cli(tmp_path, {"XDG_CONFIG_HOME": str(tmp_path)})


def test_the_documented_commands_export_a_job_whose_image_is_built(cloud: Cli) -> None:
    page, file = (ROOT / "docs" / "kubernetes.md").read_text(), ROOT / "jobs" / "imagenet_2node.yaml"
    found = re.findall("^launcher export job.yaml (.*?)(?: +#.*)?$", page, re.MULTILINE)
    assert len(found) == 2
    for arguments in found:
        done = cloud("export", file, *arguments.split())
        *_, made = yaml.safe_load_all(done.stdout)
        assert made["metadata"]["name"] == "imagenet-2node"
        assert "warning: hang_timeout has no effect" in done.stderr


def test_every_job_of_this_repository_that_has_an_image_is_exported(cloud: Cli) -> None:
    """Those that use all GPUs too: the settings say how many these are."""
    jobs = {file: load_job(file, ["sweep=null"]) for file in (ROOT / "jobs").rglob("*.yaml")}
    shown = {file: job.gpus == "all" for file, job in jobs.items() if job.runtime == "docker"}
    assert len(shown) > 30
    for file, every in shown.items():
        done = cloud("export", file, "--to", "jobset", "--image", "r/x", "--on", "k8s", "--set", "sweep=null")
        assert ('nvidia.com/gpu: "7"' in done.stdout) == every, file
    assert any(shown.values())


def test_gpus_all_without_a_number_has_an_advice_that_is_possible(cloud: Cli) -> None:
    file = cloud.job(image={"base": "a"}, nodes=2, gpus="all", run={"command": ["true"]})
    export = ("export", file, "--to", "jobset", "--image", "r/x")
    assert "set `gpus` of the cluster in the settings file and name the cluster" in cloud(*export, code=2).stderr
    assert 'nvidia.com/gpu: "7"' in cloud(*export, "--on", "k8s").stdout


def test_for_min_nodes_only_that_key_is_refused() -> None:
    message = refused(COMMAND, jobset=False, min_nodes=2)
    assert "min_nodes: is not supported on a cluster" in message
    assert "restarts:" not in message


def test_kubernetes_needs_an_image_with_the_code() -> None:
    with pytest.raises(UsageError, match="the image of the pods must contain the code"):
        kubernetes.check(job({**GPU, "restarts": 0}), jobset=False, image=None)


STRING, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
STRINGS = {"type": "object", "additionalProperties": STRING}


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


DNS = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}


RULE = closed(
    ["name", "action"],
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    targetReplicatedJobs={"type": "array", "items": STRING},
    onJobFailureReasons={
        "type": "array",
        "items": {
            "enum": [
                "BackoffLimitExceeded",
                "DeadlineExceeded",
                "FailedIndexes",
                "MaxFailedIndexesExceeded",
                "PodFailurePolicy",
            ]
        },
    },
    onJobFailureMessagePatterns={"type": "array", "items": STRING},
)


# The fields of jobset.x-k8s.io/v1alpha2; the Job in it is validated by Kubernetes' own schema.
JOBSET = closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=closed(["name"], name=DNS, namespace=DNS, labels=STRINGS, annotations=STRINGS),
    spec=closed(
        ["replicatedJobs"],
        network=closed(
            [],
            enableDNSHostnames={"type": "boolean"},
            publishNotReadyAddresses={"type": "boolean"},
            subdomain=DNS,
        ),
        successPolicy=closed(["operator"], operator={"enum": ["All", "Any"]}, targetReplicatedJobs={"type": "array"}),
        failurePolicy=closed(
            [],
            maxRestarts=COUNT,
            restartStrategy={"enum": ["Recreate", "BlockingRecreate"]},
            rules={"type": "array", "items": RULE},
        ),
        startupPolicy=closed(["startupPolicyOrder"], startupPolicyOrder={"enum": ["AnyOrder", "InOrder"]}),
        suspend={"type": "boolean"},
        coordinator=closed(["replicatedJob"], replicatedJob=STRING, jobIndex=COUNT, podIndex=COUNT),
        managedBy=STRING,
        ttlSecondsAfterFinished=COUNT,
        replicatedJobs={
            "type": "array",
            "minItems": 1,
            "items": closed(
                ["name", "template"],
                name=DNS,
                groupName=STRING,
                replicas=COUNT,
                dependsOn={"type": "array"},
                template=closed(["spec"], metadata={"type": "object"}, spec={"type": "object"}),
            ),
        },
    ),
)


def test_the_schemas_refuse_unknown_fields() -> None:
    made = yaml.safe_load(manifests(GPU, jobset=True))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**made, "spec": {**made["spec"], "restarts": 1}}, JOBSET)
    template = made["spec"]["replicatedJobs"][0]["template"]
    template["spec"]["template"]["spec"]["containers"][0]["enviroment"] = []
    items = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": made["metadata"], **template}]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({"apiVersion": "batch/v1", "kind": "JobList", "items": items}, "1.37", strict=True)


def test_pitfall_6_a_pod_waits_for_the_masters_name(tmp_path: Path) -> None:
    fake = tmp_path / "getent"
    fake.write_text(f"#!/bin/sh\necho . >>{tmp_path}/asked\n[ $(wc -l <{tmp_path}/asked) -ge 3 ]\n")
    fake.chmod(0o755)
    (tmp_path / "nslookup").symlink_to("/bin/false")
    made = yaml.safe_load(manifests(GPU, jobset=True))
    assert made["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    (pod,) = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_ADDR": "imagenet-node-0-0.imagenet"}
    before = time.monotonic()
    done = subprocess.run(
        [*pod["command"], "echo", "trains"],
        env={**env, "LAUNCHER_OUTPUT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "trains\n"
    assert time.monotonic() - before > 1.5
    assert {"name": "MASTER_ADDR", "value": "imagenet-node-0-0.imagenet"} in pod["env"]


def test_pitfall_7_a_pods_shared_memory_is_not_64_mb() -> None:
    made = yaml.safe_load(manifests(GPU, jobset=True))
    pod = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
