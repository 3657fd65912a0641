"""--compile of the blocks of a model, with graphs that run as they are."""

import copy
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.train.programs.alike import Alike, Block
from tests.train.runs import OLD, digit_tree
from tests.train.trainer.test_step import counting
from train.__main__ import main
from train.compiled import compile_blocks, kinds
from train.config import Config
from train.distributed.fsdp import blocks, lacking
from train.errors import TrainError

CONFIG = Config(data="", image_size=8, compile=True, parallel="fsdp")


def test_blocks_that_are_alike_share_a_graph_and_one_that_computes_something_else_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs, model, images = counting(monkeypatch), Alike(10), torch.randn(4, 3, 8, 8)
    plain = copy.deepcopy(model)
    about = compile_blocks(model, blocks(model), CONFIG)
    assert about == "5 blocks with 89% of the weights; what is outside of them is not compiled"
    assert list(model.state_dict()) == list(plain.state_dict())
    for _ in range(2):
        for each in (model, plain):
            each.zero_grad()
            each(images).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]  # both have one
        with torch.no_grad():
            assert torch.equal(model.eval()(images), plain.eval()(images))
        model.train()
    assert graphs == [True] * 3 + [False] * 3


@pytest.mark.skipif(OLD, reason="torch before 2.6 only warns")
@pytest.mark.parametrize("count", [1, 2])
def test_a_block_that_would_run_uncompiled_is_an_error(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where torch's limit for all graphs of a piece of code is lower."""
    monkeypatch.setattr("torch._dynamo.config.accumulated_recompile_limit", 4)
    graphs, model = counting(monkeypatch), nn.Sequential(*(Block(power) for power in range(1, count + 1)))
    compile_blocks(model, blocks(model), CONFIG)
    most = kinds(CONFIG)
    for size in range(2, 2 + most):
        model(torch.ones(size, 8, 4, 4))
    assert len(graphs) == most * count == 6 * count
    why = rf"block 0 was compiled {6 * count} times.*inputs of shape \(8, 8, 4, 4\) need another time"
    with pytest.raises(TrainError, match=why):
        model(torch.ones(2 + most, 8, 4, 4))


def test_a_model_without_blocks_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TrainError, match=r"--compile with --parallel fsdp compiles a model's blocks.*has none"):
        compile_blocks(model, blocks(model), CONFIG)


def test_a_block_in_two_places_is_one() -> None:
    block = Block(1)
    assert blocks(nn.Sequential(nn.Sequential(block), nn.Sequential(block))) == [block]


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_a_torch_that_would_need_hooks_inside_of_a_block_is_refused_by_name(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 2.6, in mixed precision, where norms keep their weights in fp32."""
    assert not list(lacking(replace(CONFIG, parallel=kind)))
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", lambda module, *, mesh, mp_policy: module)
    (found,) = lacking(replace(CONFIG, parallel=kind))
    assert re.match(rf"--parallel {kind} with --compile needs .*, which torch \S+ lacks; use", found)


@pytest.mark.parametrize("said", ["No working C++ compiler found in torch._inductor", "Failed to find C compiler. Pl"])
def test_without_a_compiler_the_error_is_one_line(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torch on a CPU says it, and Triton."""

    def backend(_graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> object:
        raise RuntimeError(said)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    options = "--data synthetic:4 --arch smallcnn --compile --image-size 16 --batch-size 4 --epochs 1 --output"
    assert main([*options.split(), str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("train: error: --compile needs gcc and g++")
    assert shown.count("\n") == 1


def test_what_takes_long_without_another_line_is_said_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counting(monkeypatch)
    options = "--arch smallcnn --compile --image-size 16 --val-resize 16 --batch-size 5 --log-every 1 --epochs 2"
    where = ["--data", str(digit_tree(tmp_path / "data", 12, 4)), "--output", str(tmp_path / "run")]
    argv = [*where, *options.split()]
    says = "train: compiling for {} (--compile-mode default), which takes minutes if it is not in the compiler's cache"
    assert main(argv) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if re.search(r"^Epoch: |compiling", line)]
    assert said[0] == says.format("the first step")
    assert re.fullmatch(r"train: the first step took \d+\.\d s, with compiling", said[1])
    assert said[5] == says.format("the first validation")  # after the steps of the first epoch, before its own line
    del said[5]
    assert [line[:10] for line in said[2:]] == ["Epoch: [1]"] * 4 + ["Epoch: [2]"] * 4
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    compiled = [line.get("compiled", False) for line in lines if line["kind"] == "step"]
    assert compiled == [True, False, True, False, False, False]  # batches of 5, 5 and 2
    assert main([*argv, "--evaluate", str(tmp_path / "run" / "checkpoints" / "best.pt")]) == 0
    assert says.format("validation") in capsys.readouterr().out.splitlines()
