"""Idle InfiniBand ports, in a folder like Linux's sysfs (train/infiniband.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.train.runs import digit_tree
from train import infiniband
from train.config import parse
from train.distributed.world import StopSignal, World
from train.infiniband import LITTLE, Ports, idle_ports, read, warning
from train.trainer import Trainer


def port(root: Path, name: str, moved: int, state: str = "4: ACTIVE", layer: str = "InfiniBand") -> None:
    device, number = name.split(":")
    folder = root / device / "ports" / number
    (folder / "counters").mkdir(parents=True, exist_ok=True)
    (folder / "state").write_text(f"{state}\n")
    (folder / "link_layer").write_text(f"{layer}\n")
    (folder / "counters" / "port_xmit_data").write_text(f"{moved}\n")
    (folder / "counters" / "port_rcv_data").write_text("7\n")


def test_only_active_infiniband_ports_that_count_are_read(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0:1", 5)
    port(tmp_path, "mlx5_1:1", 5, state="1: DOWN")
    port(tmp_path, "mlx5_2:1", 5, layer="Ethernet")
    port(tmp_path, "mlx4_0:2", infiniband.FULL)
    port(tmp_path, "mlx5_3:1", 5)
    (tmp_path / "mlx5_3/ports/1/counters/port_rcv_data").write_text("N/A (no PMA)\n")
    assert read(tmp_path) == {"mlx5_0:1": 12}
    assert read(tmp_path / "none") == {}


def test_a_port_with_almost_no_traffic_is_idle() -> None:
    before = {"a:1": 100, "b:1": 100, "gone:1": 1, "reset:1": 10**9}
    assert idle_ports(before, {"a:1": 100 + LITTLE, "b:1": 99 + LITTLE, "reset:1": 0}) == 1


def test_ports_are_checked_once_after_the_first_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port(tmp_path, "mlx5_0:1", 5)
    port(tmp_path, "mlx5_1:1", 5)
    watched, other = Ports(True, tmp_path), Ports(False, tmp_path)
    port(tmp_path, "mlx5_1:1", 5 + LITTLE)
    assert watched.check() == (0.0, 0.0)
    monkeypatch.setattr(infiniband, "AFTER", 0.0)
    assert watched.check() == (1.0, 2.0)
    assert watched.check() == other.check() == (0.0, 0.0)


def test_a_single_line_names_the_nodes() -> None:
    nodes = ["gpu-a", "gpu-a", "gpu-b", "gpu-b"]
    assert warning(nodes, [(0.0, 2.0), (0.0, 0.0), (0.0, 2.0), (0.0, 0.0)]) == ""
    text = warning(nodes, [(2.0, 2.0), (0.0, 0.0), (1.0, 2.0), (0.0, 0.0)])
    assert text.startswith("3 of 4 active InfiniBand ports had no traffic in the first minute (on gpu-a, gpu-b); ")


def test_a_run_prints_the_warning_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "infiniband"
    port(root, "mlx5_0:1", 5)
    monkeypatch.setattr(infiniband, "AFTER", 0.0)
    monkeypatch.setenv("LAUNCHER_NODE", "gpu-a")
    data = digit_tree(tmp_path / "data", 40, 10)
    options = f"--data {data} --arch smallcnn --image-size 8 --batch-size 10 --epochs 1 --log-every 1 --device cpu"
    world = World(0, 1, 0, 1, torch.device("cpu"), "none")
    trainer = Trainer(parse([*options.split(), "--workers", "1", "--output", str(tmp_path)]), world)
    trainer.ports = Ports(True, root)
    trainer.train(StopSignal(world))
    assert capsys.readouterr().out.count("1 of 1 active InfiniBand ports had no traffic in the first minute") == 1
