"""Jobs whose texts for clusters are compared with golden files."""

from __future__ import annotations

from typing import Any

import yaml

from launcher.job.loader import parse_job
from launcher.job.models import Job

DIGEST = "sha256:" + "ab" * 32
CPU: dict[str, Any] = {
    "name": "digits",
    "runtime": "process",
    "nodes": ["local", "local"],
    "gpus": "none",
    "run": {"module": "train", "args": {"data": "it's here", "epochs": 12}},
    "env": {"OMP_NUM_THREADS": 1},
    "timeout": "15m",
}
GPU: dict[str, Any] = {
    "name": "imagenet",
    "image": {"ref": f"nvcr.io/nvidia/pytorch:26.09-py3@{DIGEST}"},
    "nodes": ["a", "b", "c", "d"],
    "gpus": 8,
    "run": {"script": "main.py", "args": ["--cost", "$5 $(x)"]},
    "mounts": {"/data/imagenet": "/data:ro", "/scratch": "/scratch"},
    "secrets": ["WANDB_API_KEY"],
    "restarts": 3,
    "resources": {"memory": "64g", "cpus": 16},
}
COMMAND: dict[str, Any] = {
    "name": "any",
    "image": {"ref": f"example.org/tool@{DIGEST}"},
    "nodes": ["a", "b"],
    "gpus": "none",
    "run": {"command": ["sh", "-c", "echo $RANK\nEND\n"]},
    "docker": {"ipc": "private"},
}


def job(data: dict[str, Any]) -> Job:
    return parse_job(yaml.safe_dump(data, sort_keys=False), "job.yaml")
