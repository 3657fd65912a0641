"""Export a trained model with torch.export (.pt2) or as ONNX, or its weights as safetensors.

`python -m train export CHECKPOINT FILE`
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from train.arguments import Parser
from train.config import Config
from train.errors import TrainError
from train.models import configured_model
from train.weights import read_weights, write_safetensors

# file name -> packages that writing it needs besides torch
FORMATS = {".pt2": (), ".onnx": ("onnx", "onnxscript"), ".safetensors": ("safetensors",)}


class Classifier(nn.Module):
    """The model with input normalisation: (n, 3, side, side), RGB in 0..1, to (n, classes) logits."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", mean.view(1, 3, 1, 1))
        self.register_buffer("std", std.view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model((images - self.mean) / self.std)
        return logits


def main(argv: list[str]) -> None:
    """Run the command. Raises TrainError if the checkpoint is not usable or packages for the format are missing."""
    parser = Parser(prog="python -m train export", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "checkpoint", type=Path, help="checkpoint, such as checkpoints/best.pt; EMA weights are exported if present"
    )
    parser.add_argument("file", type=Path, help="output file: .pt2 (for torch.export.load), .onnx or .safetensors")
    options = parser.parse_args(argv)
    if (needed := FORMATS.get(options.file.suffix)) is None:
        raise TrainError(f"{options.file}: the file name must end in .pt2, .onnx or .safetensors")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise TrainError(f"{options.file} needs {' and '.join(missing)}: pip install {' '.join(needed)}")
    if options.file.suffix == ".onnx" and torch.__version__ < "2.5":  # torch's TorchVersion, which compares numbers
        raise TrainError(
            f"{options.file}: the ONNX exporter of torch {torch.__version__} knows too little; use an image with torch "
            f"2.5 or newer, or export to .pt2"
        )
    weights = read_weights(options.checkpoint)
    if weights.state is None:
        raise TrainError(f"{options.checkpoint}: not a checkpoint of this trainer: its classes are unknown")
    if options.file.suffix == ".safetensors":
        write_safetensors(weights, options.file)
        print(f"train: exported {options.checkpoint} to {options.file}: {len(weights.tensors)} tensors")
        return
    known = {item.name for item in fields(Config)}
    config = Config(**{name: value for name, value in weights.state["config"].items() if name in known})
    model, classes = configured_model(config, len(weights.state["classes"])), weights.state["classes"]
    weights.load(model, other_classes=False)
    classifier = Classifier(model.float(), torch.tensor(config.mean), torch.tensor(config.std)).eval()
    _write(classifier, torch.rand(2, 3, config.image_size, config.image_size), classes, options.file)
    print(
        f"train: exported {options.checkpoint} to {options.file}: RGB in 0..1, (n, 3, {config.image_size}, "
        f"{config.image_size}), to {len(classes)} logits"
    )


def _write(model: nn.Module, example: Tensor, classes: list[str], file: Path) -> None:
    shapes: Any = ({0: torch.export.Dim("n")},)
    program = torch.export.export(model, (example,), dynamic_shapes=shapes)
    if file.suffix == ".pt2":
        torch.export.save(program, file, extra_files={"classes.json": json.dumps(classes)})
        return
    written = torch.onnx.export(program, (example,), input_names=["images"], output_names=["logits"], dynamo=True)
    assert written is not None
    written.model.metadata_props["classes"] = json.dumps(classes)
    written.save(file)
