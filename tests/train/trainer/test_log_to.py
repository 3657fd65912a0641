"""--log-to: the user's function gets the records, and cannot end the run."""

import json
import threading
import time
from pathlib import Path

import pytest

from train import log_to
from train.__main__ import main
from train.log_to import LogTo

QUICK = (
    "--data synthetic:12 --arch smallcnn --image-size 8 --epochs 2 --batch-size 4 --workers 1 --threads 1 --device cpu"
)
MODULE = """
import sys
import threading

taken, gate, later = [], threading.Event(), threading.Event()


def keep(record):
    assert threading.current_thread() is not threading.main_thread()
    taken.append(record)


def fail(record):
    taken.append(record)
    raise ValueError("no network", len(taken))


def leave(record):
    sys.exit(3)


def hang(record):
    gate.wait()
    taken.append(record)


def hang_later(record):
    if record:
        return later.set()
    gate.wait()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a user module, different in every test because modules are imported once."""
    name = f"log_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for limit in ("LIMIT", "LAST"):  # no machine is so busy that it would be exceeded
        monkeypatch.setattr(log_to, limit, 300.0)
    return name


def trained(tmp_path: Path, capfd: pytest.CaptureFixture[str], function: str) -> tuple[list[dict[str, object]], str]:
    """Train; return the records of metrics.jsonl, and the text."""
    assert main([*QUICK.split(), "--output", str(tmp_path / "out"), "--log-to", function]) == 0
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], capfd.readouterr().out


def taken(module: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = __import__(module).taken
    return found


def test_it_gets_every_record_in_order_on_another_thread(
    module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    records, text = trained(tmp_path, capfd, f"{module}:keep")
    assert taken(module) == records
    assert [record["kind"] for record in records] == ["start", "step", "epoch", "step", "epoch", "end"]
    assert "warning" not in text


@pytest.mark.parametrize(
    ("function", "says"), [("fail", "15: ValueError: ('no network', 1)"), ("leave", "19: SystemExit: 3")]
)
def test_what_it_raises_is_one_warning(
    function: str, says: str, module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    records, text = trained(tmp_path, capfd, f"{module}:{function}")
    (warning,) = [line for line in text.splitlines() if "warning" in line]
    assert warning == (
        f"train: warning: --log-to {module}:{function}: {tmp_path}/{module}.py:{says}; the run goes on, and "
        f"metrics.jsonl has all records"
    )
    if function == "fail":  # the others may arrive
        assert taken(module) == records


def test_a_call_that_does_not_return_is_one_warning_and_delays_the_end_no_longer_than_the_limit(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one may take longer: it sets up."""
    for limit in ("LIMIT", "LAST"):
        monkeypatch.setattr(log_to, limit, 0.0)
    said: list[str] = []
    to = LogTo(f"{module}:hang_later", said.append)
    to.send('{"number": 0}')
    __import__(module).later.wait()
    assert not said
    deadline = time.monotonic() + 300
    while not said and time.monotonic() < deadline:
        to.send("{}")
        time.sleep(0.01)
    to.close()
    (line,) = said
    assert line.startswith(f"train: warning: --log-to {module}:hang_later: a call takes longer than 0 s; the run goes")
    __import__(module).gate.set()


def test_records_that_are_left_at_the_end_are_counted(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_to, "LAST", 0.0)
    said: list[str] = []
    to = LogTo(f"{module}:hang", said.append)
    to.send("{}")
    to.send("{}")
    to.close()
    assert said == [
        f"train: warning: --log-to {module}:hang: at the end, 2 records had not been taken; the run goes on, and "
        f"metrics.jsonl has all records"
    ]
    __import__(module).gate.set()


def test_the_end_waits_for_the_records(module: str) -> None:
    said: list[str] = []
    to = LogTo(f"{module}:hang", said.append)
    for number in range(3):
        to.send(json.dumps({"number": number}))
    threading.Timer(0.1, __import__(module).gate.set).start()
    to.close()
    assert [record["number"] for record in taken(module)] == [0, 1, 2]
    assert not said


def test_what_names_no_function_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK.split(), "--output", str(tmp_path / "out"), "--log-to", "wandb"]) == 2
    assert "--log-to wandb: must be MODULE:FUNCTION" in capfd.readouterr().err
