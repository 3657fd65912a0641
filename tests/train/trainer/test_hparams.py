"""TensorBoard's HParams tab, queried as its page does: one session per run, with settings and results."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ports import free_port
from tests.train.runs import SECONDS, digit_tree, run

COMMON = "--arch smallcnn --image-size 16 --val-resize 16 --augment none --workers 1 --device cpu --epochs 1"
OPTIONS = COMMON.split()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """TensorBoard on two runs that differ in learning rate and number of processes."""
    data = digit_tree(tmp_path_factory.mktemp("data"), 40, 20)
    folder = tmp_path_factory.mktemp("runs")
    run(folder / "one", 1, *OPTIONS, "--data", data, "--batch-size", 8, "--lr", 0.25)
    run(folder / "two", 2, *OPTIONS, "--data", data, "--batch-size", 4, "--lr", 0.125, "--syncbn", "custom")
    port = free_port()
    board = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tensorboard.main",
            "--logdir",
            str(folder),
            "--port",
            str(port),
            "--load_fast",
            "false",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}/data/plugin/hparams/"
    finally:
        board.kill()
        board.wait()


def query(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the response after both runs have been read."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                answer: dict[str, Any] = json.load(response)
            if len(answer.get("sessionGroups", answer.get("hparamInfos", []))) >= 2:
                return answer
        except OSError:  # the server does not listen yet
            pass
        assert time.monotonic() < deadline, f"no response from {url}"
        time.sleep(0.2)


def test_the_columns_are_the_settings_in_which_runs_differ(address: str) -> None:
    experiment = query(address + "experiment", {"experimentName": ""})
    names = {info["name"] for info in experiment["hparamInfos"]}
    assert {"parallel", "world", "global_batch", "lr", "syncbn", "dual_merge", "micro_batches"} <= names
    assert "Accuracy/val" in {info["name"]["tag"] for info in experiment["metricInfos"]}


def test_each_run_is_a_row_with_its_results(address: str) -> None:
    columns = [{"hparam": name, "includeInResult": True} for name in ("lr", "parallel", "syncbn", "world")]
    columns += [{"metric": {"tag": "Accuracy/val", "group": ""}, "includeInResult": True}]
    body = {
        "experimentName": "",
        "allowedStatuses": ["STATUS_SUCCESS", "STATUS_UNKNOWN", "STATUS_FAILURE", "STATUS_RUNNING"],
        "colParams": columns,
        "startIndex": 0,
        "sliceSize": 100,
    }
    groups = query(address + "session_groups", body)["sessionGroups"]
    found = {
        group["hparams"]["lr"]: (
            group["hparams"]["parallel"],
            group["hparams"]["world"],
            group["hparams"]["syncbn"],
            "Accuracy/val" in [value["name"]["tag"] for value in group["metricValues"]],
            [session["status"] for session in group["sessions"]],
        )
        for group in groups
    }
    assert found == {
        0.25: ("single", 1, "none", True, ["STATUS_SUCCESS"]),
        0.125: ("ddp", 2, "custom", True, ["STATUS_SUCCESS"]),
    }
