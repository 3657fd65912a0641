"""`launcher fetch --best`: the checkpoint of the best variant, on this machine."""

from __future__ import annotations

import json

import pytest

from tests.e2e.cli import Cli
from tests.e2e.fixtures import cli, home_cli

__all__ = ["cli", "home_cli"]
pytestmark = pytest.mark.timeout(200)
PROGRAM = """
import json, os, pathlib, sys
rate, out = float(sys.argv[-1]), pathlib.Path(os.environ["LAUNCHER_OUTPUT"])
(out / "checkpoints").mkdir()
with (out / "metrics.jsonl").open("w") as metrics:
    for step in range(1, 6):
        line = {"kind": "step", "time": 1.0, "step": step, "acc": rate * (10 - abs(step - 3))}
        metrics.write(json.dumps(line) + "\\n")
        (out / "checkpoints" / f"step-{step}.pt").write_text(f"{rate} {step}")
"""


def test_the_best_variant_is_fetched_with_its_checkpoint(home_cli: Cli) -> None:
    (home_cli.cwd / "own.py").write_text(PROGRAM)
    run = {"command": ["python3", "own.py"]}
    sweep = [["0.1"], ["0.3"], ["0.2"], ["0.30"]]
    home_cli("up", home_cli.job("own", runtime="process", nodes=["local"], run=run, sweep=sweep))
    assert "best: 0.3, " in home_cli("compare", "own", "--by", "acc").stdout
    fetched = home_cli("fetch", "own", "--best", "acc").stdout
    assert "best: 0.3, acc 3 at step 3; with the same value: 0.30\n" in fetched
    checkpoint = fetched.partition("its checkpoint: ")[2].partition(",")[0]
    assert (home_cli.cwd / checkpoint).read_text() == "0.3 3"
    assert [json.loads(line)["acc"] for line in (home_cli.runs()[1] / "metrics.jsonl").open()][2] == pytest.approx(3.0)
    assert not (home_cli.runs()[0] / "checkpoints").exists()
    assert "needs --best" in home_cli("fetch", "own", "--min", code=2).stderr
    home_cli("fetch", "own", "all")
    assert {path.name for path in (home_cli.cwd / "all").iterdir()} == {run.name for run in home_cli.runs()}


WITHOUT_TIME = """
import json, os, pathlib, sys
out = pathlib.Path(os.environ["LAUNCHER_OUTPUT"])
(out / "checkpoints").mkdir()
(out / "checkpoints" / "last.pt").write_text("x")
for line in ({"kind": "step", "time": 1.0, "step": 19}, {"kind": "eval", "step": 20, "acc": float(sys.argv[-1])}):
    with (out / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(line) + "\\n")
"""


def test_why_no_checkpoint_is_known_as_that_of_the_best_value(home_cli: Cli) -> None:
    """Its line has no time; then its files were deleted."""
    (home_cli.cwd / "own.py").write_text(WITHOUT_TIME)
    run = {"command": ["python3", "own.py"]}
    home_cli("up", home_cli.job("own", runtime="process", nodes=["local"], run=run, sweep=[["1"], ["2"]]))
    best = {"tag": "acc", "run": home_cli.runs()[1].name, "step": 20, "value": 2.0, "checkpoint": None}
    assert json.loads(home_cli("fetch", "own", "there", "--best", "acc", "--json").stdout)["best"] == best
    why = "no name has step 20, and its line of the metrics has no `time`; the newest is there/checkpoints/last.pt"
    assert why in home_cli("fetch", "own", "there", "--best", "acc").stdout
    for run_ in home_cli.runs():
        home_cli("down", run_.name)
    home_cli("clean", "--unfetched", "--yes")
    said = home_cli("fetch", "own", "--best", "acc").stdout
    assert "was deleted by" in said
    assert "no checkpoint of it is left" in said
