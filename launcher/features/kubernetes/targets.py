"""The targets `jobset` and `job` of `launcher export`."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from launcher.cli.terminal import Reporter
from launcher.export.target import Keys, Target
from launcher.features.kubernetes import manifests
from launcher.job.models import Job
from launcher.job.settings import read_settings
from launcher.model.plan import new_run_id
from launcher.planning import cluster


def _text(job: Job, name: str | None, image: str | None, *, jobset: bool) -> str:
    settings = manifests.ANY if name is None else read_settings(os.environ).kubernetes(name)
    job.refuse(_BOTH.refusals(job))
    manifests.check(job, jobset=jobset, image=image)
    planned = cluster.build(job, "python3", settings.gpus)
    for warning in (*planned.warnings, *manifests.unheeded(job)):
        Reporter().warn(warning)
    target = manifests.PodTarget(image or "", new_run_id(job.name), settings)
    made = (manifests.jobset if jobset else manifests.indexed_job)(planned, target)
    return manifests.text(planned, target, made)


_OF_THE_IMAGE = ("image.base", "image.ref", "image.torchvision", "image.packages")
_REFUSED = " ".join(key for key in cluster.REFUSED.split() if key != "data")
_OF_SLURM = "cluster.partition cluster.account cluster.qos cluster.time cluster.options"
_BOTH = Keys(
    handled="name nodes gpus processes run.module run.script run.command run.args mounts env secrets secrets.name "
    "output port timeout resources.memory resources.cpus resources.shm docker.ipc docker.extra_hosts docker.cap_add",
    refused={
        "models": "mount a volume and set env: {HF_HOME: ..., TORCH_HOME: ...}",
        "budget": "a pod has no script of the launcher that sees the first step; use timeout",
    },
    refused_by={cluster.build: _REFUSED, manifests.check: f"runtime data {_OF_SLURM}"},
    unused={
        **dict.fromkeys(_OF_THE_IMAGE, "the image of the pods is that of --image, and is not checked"),
        "cache": "nothing is kept of what is compiled at run time",
        "code": "the image of the pods contains it",
        "revision": "the image of the pods contains the code",
        "nodes.name": "Kubernetes chooses the machines",
        "nodes.host": "Kubernetes chooses the machines",
        "hang_timeout": "Kubernetes does not detect a hang, which a warning says",
        "resources.output": "the space of the volume is not checked",
        "secrets.file": "the value is in a Secret, which the user creates",
    },
)
JOBSET = Target(replace(_BOTH, handled=f"{_BOTH.handled} restarts"), partial(_text, jobset=True))
_OF_A_JOB = {**_BOTH.refused_by, manifests.check: f"runtime restarts data {_OF_SLURM}"}
JOB = Target(replace(_BOTH, refused_by=_OF_A_JOB), partial(_text, jobset=False))
