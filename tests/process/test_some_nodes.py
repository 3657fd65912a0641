"""`--nodes` with some of a run's nodes: what is known of the others."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

import launcher
from launcher.api.history import runs_on
from launcher.model import labels
from launcher.model.progress import silent
from tests.process.machine import Machine


def test_a_run_that_has_ended_on_the_named_nodes_is_neither_lost_nor_done(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    spec = machine.spec("true")
    known = {labels.JOB: "job", labels.NODE_RANK: "0", labels.RANKS: "0+1", labels.NODES: "local,gpu-b,gpu-c"}
    known |= {labels.OUTPUT: str(machine.output), labels.UID: str(os.getuid()), labels.OWNER: "me@here"}
    known |= {labels.CREATED: "1", labels.RUNTIME: "process", labels.GPUS: "", labels.HOST: "local"}
    engine, name = machine.start(dataclasses.replace(spec, labels=spec.labels | known))
    assert engine.wait(name, 60).exit_code == 0

    rows, failed = runs_on(["local"], silent)
    assert [(row.state, row.exit_code, row.not_asked) for row in rows] == [("ended here", None, ("gpu-b", "gpu-c"))]
    assert failed == []
    with launcher.find(machine.run, nodes=["local"], log=None) as run:
        seen = run.status()
    assert (seen.state, seen.ended) == ("ended here", True)
    assert [(node.node, node.state) for node in seen.nodes] == [
        ("local-0", "exited"),
        ("gpu-b", "not asked"),
        ("gpu-c", "not asked"),
    ]
