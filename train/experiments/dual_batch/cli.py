"""Commands `python -m train dual-batch plan` and `fit`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from train.arguments import Parser
from train.errors import TrainError
from train.experiments.dual_batch.options import WHOLE, costs_of
from train.experiments.dual_batch.plan import plan_dual_batch


def main(argv: list[str]) -> None:
    """Run one of the two commands.

    Raises:
        TrainError: there is no valid plan, or the measurement failed.
    """
    options = _parser().parse_args(argv)
    result = _plan(options) if options.verb == "plan" else _fit(options)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name.replace('_', ' '):<14} {value}")


def _parser() -> Parser:
    root = Parser(
        prog="python -m train dual-batch", description="Dual batch size learning: plan batch sizes, measure costs."
    )
    verbs = root.add_subparsers(dest="verb", required=True)
    plan = verbs.add_parser("plan", help="plan batch sizes, data split and update factor", allow_abbrev=False)
    plan.add_argument("--workers", type=int, required=True, metavar="G", help="number of workers")
    plan.add_argument("--small", type=int, required=True, metavar="S", help="number of workers with a small batch")
    plan.add_argument("--samples", type=int, required=True, metavar="N", help="number of training samples")
    plan.add_argument("--base-batch", type=int, required=True, metavar="B", help="large batch size")
    plan.add_argument(
        "--ratio", type=float, required=True, metavar="K", help="duration of a round relative to large batches only"
    )
    plan.add_argument(
        "--a",
        type=float,
        required=True,
        nargs="+",
        metavar="A",
        help="seconds per sample: one value, or one per worker",
    )
    plan.add_argument(
        "--b", type=float, required=True, nargs="+", metavar="B", help="seconds per batch: one value, or one per worker"
    )
    plan.add_argument(
        "--variant",
        choices=tuple(WHOLE),
        default="published",
        help="published: truncated sizes; follow_up: rounded sizes",
    )
    fit = verbs.add_parser("fit", help="measure a and b on this machine", allow_abbrev=False)
    fit.add_argument("--arch", default="cifar_resnet18", help="model architecture")
    fit.add_argument("--classes", type=int, default=100, metavar="N", help="number of classes")
    fit.add_argument("--image-size", type=int, default=32, metavar="N", help="image size in pixels")
    fit.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32, 64, 128], metavar="N", help="batch sizes")
    fit.add_argument("--repeats", type=int, default=5, metavar="N", help="steps per batch size; the median is used")
    fit.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    for verb in (plan, fit):
        verb.add_argument("--json", action="store_true", help="print JSON")
    return root


def _plan(options: argparse.Namespace) -> dict[str, object]:
    costs = costs_of(options.a, options.b)
    return plan_dual_batch(
        options.workers,
        options.small,
        options.samples,
        options.base_batch,
        options.ratio,
        costs,
        WHOLE[options.variant],
    ).to_dict()


def _fit(options: argparse.Namespace) -> dict[str, object]:
    import torch  # imported here because planning does not need it

    from train.experiments.dual_batch.fit import fit, measure

    if min(options.batches) < 2 or options.repeats < 1:
        raise TrainError("--batches: must be at least 2, because of batch norm; --repeats: must be at least 1")
    found = torch.cuda.device_count() if options.device != "cpu" else 0
    if options.device == "cuda" and not found:
        raise TrainError("--device cuda: torch found no GPU")
    device = torch.device("cuda" if found else "cpu")
    timings = measure(options.arch, options.classes, options.image_size, options.batches, options.repeats, device)
    return asdict(fit(timings)) | {"timings": [asdict(timing) for timing in timings]}
