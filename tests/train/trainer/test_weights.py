"""Weights from files: fine-tuning with other classes, validation without training, and export."""

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.train.runs import DIGITS, digit_tree, run
from train.__main__ import main
from train.errors import TrainError
from train.models import make_model
from train.weights import Weights, read_weights, write_safetensors

OPTIONS = "--arch smallcnn --image-size 16 --val-resize 16 --batch-size 8 --workers 1 --threads 1 --device cpu"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_tree(tmp_path_factory.mktemp("data"), 48, 21)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run with averaged weights."""
    folder = tmp_path_factory.mktemp("trained")
    options = ["--data", str(data), "--output", str(folder), *OPTIONS.split()]
    assert main([*options, "--epochs", "2", "--ema-decay", "0.9", "--ema-every", "2", "--lr", "1"]) == 0
    return folder


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def save(path: Path, arch: str, classes: int, **rename: str) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = make_model(arch, classes).state_dict()
    torch.save(state, path)
    return state


def test_evaluate_gives_the_scores_of_the_best_epoch_on_two_processes(
    data: Path, trained: Path, tmp_path: Path
) -> None:
    best = max(lines(trained, "epoch"), key=lambda line: float(line["val"]["top1"]))["val"]
    file = trained / "checkpoints" / "best.pt"
    first = run(tmp_path, 2, "--data", data, "--evaluate", file, *OPTIONS.split())[0]
    end = first.metrics("end")[0]
    assert {name: end[name] for name in best} == pytest.approx(best, rel=1e-6)
    assert f"train: {file}: val Loss" in first.lines[-1]
    assert not (first.output / "checkpoints").exists()


def test_evaluate_needs_no_training_batch(data: Path, trained: Path, tmp_path: Path) -> None:
    options = ["--data", str(data), "--output", str(tmp_path / "out"), *OPTIONS.split(), "--batch-size", "4096"]
    assert main([*options, "--evaluate", str(trained / "checkpoints" / "best.pt")]) == 0
    assert main([*options, "--epochs", "1"]) == 2


def test_fine_tuning_starts_with_all_weights_except_the_last_layers(trained: Path, tmp_path: Path) -> None:
    """From ten digits to three."""
    tree = digit_tree(tmp_path / "data", 48, 21)
    for folder in tree.glob("*/[3-9]"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    options = ["--data", str(tree), "--output", str(tmp_path / "out"), *OPTIONS.split()]
    file = trained / "checkpoints" / "best.pt"
    assert main([*options, "--epochs", "1", "--lr", "1e-12", "--pretrained", str(file)]) == 0
    tuned = torch.load(tmp_path / "out" / "checkpoints" / "last.pt", weights_only=True)["model"]
    source = torch.load(file, weights_only=True)["ema"]
    assert tuned["classifier.weight"].shape == (3, 64)
    for name, value in source.items():
        if not name.startswith("classifier"):
            assert torch.allclose(tuned[name], value, atol=1e-6), name
    # a resumed run continues from its checkpoint, not from --pretrained again
    assert main([*options, "--epochs", "2", "--lr", "1e-12", "--pretrained", "/not/there.pt"]) == 0


@pytest.mark.parametrize(
    ("wrap", "arch"),
    [
        (lambda state: state, "resnet18"),
        (lambda state: {"state_dict": {f"module.{name}": value for name, value in state.items()}}, "resnet18"),
        (lambda state: {"model": state, "args": None, "epoch": 3}, "resnet18"),
        # as timm's train.py and torchvision's write them, the latter with --model-ema
        (lambda state: {"arch": "resnet18", "state_dict": state, "args": Namespace(model="resnet18")}, "resnet18"),
        (
            lambda state: {
                "model": {n: torch.zeros_like(v) for n, v in state.items()},
                "model_ema": {"n_averaged": torch.tensor(7)} | {f"module.{n}": v for n, v in state.items()},
                "args": Namespace(model="resnet18", output_dir=Path("/tmp/out"), device="cuda"),
                "epoch": 3,
            },
            "resnet18",
        ),
        (lambda state: {f"_orig_mod.{n}": v for n, v in state.items()}, "resnet18"),
        (lambda state: {n: v for n, v in state.items() if "num_batches" not in n}, "resnet18"),
        (lambda state: {n.replace(".norm1.", ".norm.1."): v for n, v in state.items()}, "densenet121"),
        (lambda state: state | {"AuxLogits.conv0.weight": torch.zeros(1)}, "inception_v3"),
    ],
)
def test_files_of_torchvision_and_timm_are_loaded(tmp_path: Path, wrap: Any, arch: str) -> None:
    state = make_model(arch, 7).state_dict()
    torch.save(wrap(state), tmp_path / "weights.pth")
    weights, model = read_weights(tmp_path / "weights.pth"), make_model(arch, 5)
    fresh = weights.load(model, other_classes=True)
    assert {name.rpartition(".")[2] for name in fresh} == {"weight", "bias"}
    own = model.state_dict()
    assert all(torch.equal(own[name], state[name]) for name in own if name not in fresh and "num_batches" not in name)
    with pytest.raises(TrainError, match="and the classes of the file"):
        weights.load(model, other_classes=False)


def test_weights_that_do_not_match_are_refused(tmp_path: Path) -> None:
    torch.save(make_model("resnet18", 5).state_dict(), tmp_path / "weights.pth")
    says = (
        r"does not match --arch: it lacks \d+ of the model's 320 tensors \(first layer1.0.conv3.weight\), \d+ have "
        r"other shapes \(first layer1.0.conv1.weight: \(64, 64, 3, 3\) in the file, \(64, 64, 1, 1\) in the model\); "
        r"use the architecture of the file$"
    )
    with pytest.raises(TrainError, match=says):
        read_weights(tmp_path / "weights.pth").load(make_model("resnet50", 5), other_classes=True)
    (tmp_path / "other.pth").write_bytes(b"no weights")
    with pytest.raises(TrainError, match="not a file of weights"):
        read_weights(tmp_path / "other.pth")
    with pytest.raises(TrainError, match="no such file on this machine"):
        read_weights(tmp_path / "third.pth")
    torch.save({"epoch": 3}, tmp_path / "fourth.pth")
    with pytest.raises(TrainError, match="not a state dict"):
        read_weights(tmp_path / "fourth.pth")


@pytest.mark.parametrize(
    ("content", "use"),
    [
        ({"patch_embed.proj.weight": torch.zeros(1)}, "--arch timm:NAME, because its layers have timm's names"),
        ({"arch": "vit_t", "state_dict": {"x": torch.zeros(1)}, "args": Namespace()}, "--arch timm:vit_t"),
        ({"arch": "resnet50", "state_dict": {"x": torch.zeros(1)}}, "--arch resnet50"),
        ({"model": {"x": torch.zeros(1)}, "args": Namespace(model="vit_b_16")}, "--arch vit_b_16"),
    ],
)
def test_the_architecture_of_a_file_is_named(content: Any, use: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(TrainError, match=f"; use {use}$"):
        read_weights(tmp_path / "weights.pth").load(make_model("smallcnn", 5), other_classes=True)


class Code:
    """A class that is not allowed in `args`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("/tmp/was-here"),)


def test_a_file_that_might_run_code_is_not_read(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "args": Code()}, tmp_path / "weights.pth")
    with pytest.raises(TrainError, match="which may run code when loaded"):
        read_weights(tmp_path / "weights.pth")


def test_the_exported_model_gives_the_logits_of_the_averaged_weights(trained: Path, tmp_path: Path) -> None:
    assert main(["export", str(trained / "checkpoints" / "best.pt"), str(tmp_path / "model.pt2")]) == 0
    extra = {"classes.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra).module()
    assert json.loads(extra["classes.json"]) == [str(digit) for digit in range(10)]
    model = make_model("smallcnn", 10).eval()
    model.load_state_dict(torch.load(trained / "checkpoints" / "best.pt", weights_only=True)["ema"])
    images = torch.rand(5, 3, 16, 16)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert torch.allclose(program(images), model((images - mean) / std), atol=1e-5)


@pytest.mark.slow
def test_the_exported_onnx_model_computes_the_same(trained: Path, tmp_path: Path) -> None:
    if torch.__version__ < "2.5":
        pytest.skip("torch before 2.5")
    for file in ("model.onnx", "model.pt2"):
        assert main(["export", str(trained / "checkpoints" / "best.pt"), str(tmp_path / file)]) == 0
    images = torch.rand(5, 3, 16, 16)
    expected = torch.export.load(tmp_path / "model.pt2").module()(images)
    session = importlib.import_module("onnxruntime").InferenceSession(tmp_path / "model.onnx")
    (logits,) = session.run(None, {"images": images.numpy()})
    torch.testing.assert_close(torch.tensor(logits), expected, atol=1e-4, rtol=1e-4)
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == [str(digit) for digit in range(10)]


def test_onnx_needs_a_torch_with_todays_exporter(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.4.1"))
    assert main(["export", str(trained / "checkpoints" / "best.pt"), str(tmp_path / "model.onnx")]) == 2
    assert "the ONNX exporter of torch 2.4.1 knows too little" in capsys.readouterr().err


def test_weights_as_safetensors_are_those_of_the_checkpoint(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best, file = trained / "checkpoints" / "best.pt", tmp_path / "weights.safetensors"
    assert main(["export", str(best), str(file)]) == 0
    saved = torch.load(best, weights_only=True)["ema"]
    found = load_file(file)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], value) for name, value in saved.items())
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    assert (about["arch"], json.loads(about["classes"])) == ("smallcnn", [str(digit) for digit in range(10)])

    options = ["--data", str(data), "--output", str(tmp_path / "out"), *OPTIONS.split()]
    assert main([*options, "--evaluate", str(file)]) == 0
    score = max(lines(trained, "epoch"), key=lambda line: float(line["val"]["top1"]))["val"]
    assert {name: lines(tmp_path / "out", "end")[0][name] for name in score} == pytest.approx(score, rel=1e-6)
    assert main([*options, "--epochs", "1", "--lr", "1e-12", "--pretrained", str(file)]) == 0
    tuned = torch.load(tmp_path / "out" / "checkpoints" / "last.pt", weights_only=True)["model"]
    assert all(torch.allclose(tuned[name], value, atol=1e-6) for name, value in saved.items())

    capsys.readouterr()
    assert main(["export", str(best), str(tmp_path / "nowhere" / "weights.safetensors")]) == 2
    assert "weights.safetensors could not be written" in capsys.readouterr().err
    tree = digit_tree(tmp_path / "data", 48, 21)
    for folder in tree.glob("*/9"):
        folder.rename(folder.with_name("nine"))
    assert main([*options, "--data", str(tree), "--evaluate", str(file)]) == 2
    assert "has classes (10) 0, 1, 2, ..., but the data has" in capsys.readouterr().err


def test_safetensors_of_other_programs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images in another layout and tied weights are written too: torch has no such limits."""
    model, file = make_model("resnet18", 7).to(memory_format=torch.channels_last), tmp_path / "weights.safetensors"
    state = model.state_dict()
    save_file({f"module.{name}": value.contiguous() for name, value in state.items()}, file, {"classes": "not JSON"})
    weights = read_weights(file)
    assert (weights.arch, weights.classes) == ("", ())
    assert weights.load(make_model("resnet18", 5), other_classes=True) == ["fc.weight", "fc.bias"]
    write_safetensors(Weights(file, state | {"tied": state["fc.bias"]}, None), tmp_path / "other.safetensors")
    found = load_file(tmp_path / "other.safetensors")
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert torch.equal(found["tied"], state["fc.bias"])
    file.write_bytes(b"no weights")
    with pytest.raises(TrainError, match="not a file of weights"):
        read_weights(file)
    with pytest.raises(TrainError, match="no such file on this machine"):
        read_weights(tmp_path / "third.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(TrainError, match="needs safetensors: pip install safetensors, or add"):
        read_weights(tmp_path / "other.safetensors")


def test_what_cannot_be_exported_is_refused(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        assert main(["export", str(trained / "checkpoints" / "best.pt"), str(tmp_path / "model.onnx")]) == 2
        assert "pip install onnx onnxscript" in capsys.readouterr().err
        assert main(["export", str(trained / "checkpoints" / "best.pt"), str(tmp_path / "model.safetensors")]) == 2
        assert "pip install safetensors" in capsys.readouterr().err
    assert main(["export", str(DIGITS), str(tmp_path / "model.pt2")]) == 2
    assert main(["export", str(trained / "checkpoints" / "best.pt"), str(tmp_path / "model.txt")]) == 2
