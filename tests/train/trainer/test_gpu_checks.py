"""The sections of bench/gpu.py on a CPU that pretends to be a GPU, so that failures on a GPU are caused by the GPU."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import gpu
from bench.gpu import SECTIONS
from bench.gpu_scale import Scale
from tests.gpu import checks, numerics
from tests.train.runs import OLD
from train.data.open import open_dataset
from train.data.sampler import steps_per_epoch

ROOT = Path(__file__).resolve().parents[3]
LONG = set(SECTIONS) - {"machine", "graph", "batch", "slots", "syncbn", "ddp", "files"}


def test_every_section_has_a_function() -> None:
    assert set(checks.CHECKS) | set(checks.SEVERAL) == set(SECTIONS)


@pytest.mark.ci
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in SECTIONS]
)
def test_a_section_passes(name: str) -> None:
    found = dict(checks.rows(name, dry=True))
    assert found
    for row, figures in found.items():
        assert figures["ok"] in (True, None), (row, figures)
        json.dumps(figures)
        assert gpu.shown(row, figures | {"seconds": 1.0})
    assert gpu.row({row: figures | {"seconds": 1.0} for row, figures in found.items()}).count("\n") == 2


@pytest.mark.skipif(OLD, reason="torch before 2.6")
def test_fsdp_fails_in_the_layout_that_fully_shard_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = numerics.choose_precision

    def old(*arguments: Any) -> Any:
        precision = chosen(*arguments)
        return type(precision)(**vars(precision) | {"weights_layout": precision.layout})

    monkeypatch.setattr(numerics, "choose_precision", old)
    with pytest.raises(NotImplementedError, match="non-contiguous"):
        list(checks.rows("fsdp", dry=True))


PROGRAM = """
import json, os, subprocess, sys, time
def tell(what): os.write(int(sys.argv[1]), (json.dumps(what) + chr(10)).encode())
for name in sys.stdin:
    name = name.strip()
    if name == "step": raise ValueError("the reason")
    if name == "batch": tell({"row": "batch 512", "figures": {"rate": 1}})
    if name in ("batch", "graph"):
        subprocess.Popen(["sleep", "987654"], start_new_session=True)
        print("it hangs", flush=True)
        time.sleep(600)
    tell({"row": name, "figures": {"ok": True, "pid": os.getpid()}})
    tell({"end": name})
"""


def sleepers() -> list[str]:
    found = subprocess.run(["pgrep", "-f", "sleep 987654"], capture_output=True, text=True, check=False)
    return found.stdout.split()


def test_a_section_that_fails_or_hangs_costs_a_process_and_keeps_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sections = {name: gpu.Section(0.1, 60) for name in ("machine", "fp16", "step", "batch", "ema")}
    sections["batch"] = gpu.Section(0.1, 1.0)
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    monkeypatch.setattr(gpu, "WORKER", (sys.executable, "-c", PROGRAM))
    results = gpu.Results(tmp_path / "rows.json", False, list(sections))
    assert gpu.measure(results, list(sections), float("inf")) == 1
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert rows == results.rows
    assert rows["machine"]["pid"] == rows["fp16"]["pid"] != rows["ema"]["pid"]
    assert rows["step"]["why"] == "ValueError: the reason"
    assert "Traceback" in rows["step"]["output"]
    assert rows["batch 512"]["rate"] == 1
    assert (rows["batch"]["why"], rows["batch"]["output"]) == ("ended after 1 s", "it hangs\n")
    assert not sleepers()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_it_leaves_all_printed_rows_and_no_process(number: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    program = (
        f"import sys; from bench import gpu; gpu.WORKER = (sys.executable, '-c', {PROGRAM!r}); sys.exit(gpu.main())"
    )
    command = [sys.executable, "-c", program, "--json", str(file), "--only", "machine", "graph", "ema"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        while not process.stdout.readline().startswith("machine"):
            pass
        while not sleepers():
            time.sleep(0.01)
        process.send_signal(number)
        rest = process.stdout.read()
    found = json.loads(file.read_text())
    assert found["rows"]["machine"]["ok"]
    if number is signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
        assert found["rows"]["graph"]["output"] == "it hangs\n"
        assert found["left out"] == {"ema": "SIGTERM"}
        assert "not measured: ema" in rest
    until = time.monotonic() + 30
    while sleepers() and time.monotonic() < until:  # the process that ends them does not end before them
        time.sleep(0.01)
    assert not sleepers()


def test_what_does_not_fit_comes_last_beginning_with_what_is_extra() -> None:
    names = list(SECTIONS)
    assert gpu.plan(names, None) == (names, [])
    everything = gpu.START + sum(section.seconds for section in SECTIONS.values())
    assert gpu.plan(names, everything / 60) == (names, [])
    chosen, rest = gpu.plan(names, everything / 60 - 0.1)
    assert rest == ["short"]
    chosen, rest = gpu.plan(names, 1)
    assert chosen == ["machine", "step"]
    assert chosen + rest == names


def test_there_are_batches_enough_for_every_step() -> None:
    """Synthetic data has ImageNet's number of images: an epoch has more steps than the warm-up and all rounds."""
    config = Scale(dry=False).options("--data synthetic")
    images = len(open_dataset(config.data, 8).train.labels)
    assert steps_per_epoch(images, config.batch_size, keep_last=False) > 20 * (5 + 1)


def test_dry_has_the_real_options() -> None:
    real, dry = (Scale(dry).options("--data unused") for dry in (False, True))
    assert (real.memory_format, real.amp) == (dry.memory_format, dry.amp)
    assert real.device == dry.device == "cuda"
