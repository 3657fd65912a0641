"""What the probe found in an image, and what is wrong with it in words that a user can act on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from launcher.image import versions

_SHAPES = re.compile(r"(?:mat1 and mat2 shapes cannot be multiplied|size mismatch)")
_MISSING_LIBRARY = re.compile(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file")
_CUDA_LIBRARY = re.compile(r"torch_cuda|c10_cuda|cudart|cublas|cudnn|libnv")
_MISSING_MODULE = re.compile(r"No module named '?([\w.]+)'?")


@dataclass(frozen=True)
class Check:
    """One thing that was tried. absent: there is nothing to try, as with operators before torchvision 0.3."""

    ok: bool
    error: str = ""
    absent: bool = False


@dataclass(frozen=True)
class Report:
    """What images/probe.py prints; from `pip` on by a full probe only."""

    python: str  # name of the interpreter; "" if the image has none
    python_version: str = ""
    torch: str = ""  # as torch/version.py says, "" if there is none
    torch_folder: str = ""
    torchvision: str = ""
    torchvision_folder: str = ""
    run: bool = False
    launch: bool = False
    flags: frozenset[str] = frozenset()
    pip: str = ""
    tools: tuple[str, ...] = ()
    source_tree: str = ""
    cuda: str = ""  # of torch
    checks: Mapping[str, Check] = field(default_factory=dict)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Report:
        checks: Mapping[str, Mapping[str, Any]] = found.get("checks") or {}
        values = {field.name: found[field.name] for field in fields(cls) if field.name in found}
        values["flags"], values["tools"] = frozenset(found.get("flags", ())), tuple(found.get("tools", ()))
        values["cuda"] = checks.get("import_torch", {}).get("cuda", "")
        values["checks"] = {
            name: Check(bool(check.get("ok")), check.get("error", ""), bool(check.get("absent")))
            for name, check in checks.items()
        }
        return cls(**values)


@dataclass(frozen=True)
class Fault:
    """`what` fails, `why` if that is known, `error` in the image's own words. part: python, torch or torchvision."""

    part: str
    what: str
    why: str = ""
    error: str = ""

    def __str__(self) -> str:
        return self.what + (f": {self.why}" if self.why else "")


def find_faults(report: Report) -> list[Fault]:
    """What does not work, by a full probe; empty where everything does."""
    if not report.python:
        return [Fault("python", "the image has no Python", "neither python3 nor python is on its PATH")]
    if not report.torch_folder:
        return [Fault("torch", "the image has no torch")]
    assert report.checks, "only a full probe can tell"
    torch = report.checks.get("import_torch")
    if torch is None or not torch.ok:
        error = torch.error if torch is not None else ""
        return [Fault("torch", f"torch {report.torch} cannot be imported", _import_cause(error), error)]
    if not report.torchvision_folder:
        return [Fault("torchvision", "the image has no torchvision")]
    vision = report.checks["import_torchvision"]
    if not vision.ok:
        return [_import_fault(report, vision.error)]
    found = []
    for name in ("nms", "nms_gpu"):
        check = report.checks.get(name)
        if check is not None and not check.ok:
            what = f"torchvision.ops.nms fails on the {'GPU' if name == 'nms_gpu' else 'CPU'}"
            found.append(Fault("torchvision", what, _pairing(report), check.error))
    vgg = report.checks.get("vgg16")
    if vgg is not None and not vgg.ok:
        found.append(_vgg_fault(report, vgg.error))
    return found


def find_notes(report: Report) -> list[str]:
    """What is unusual but not a fault."""
    if not report.torch or not report.torchvision:
        return []
    found = []
    if versions.belong_together(report.torch, report.torchvision) is False:
        official = versions.torchvision_for(report.torch)
        found.append(
            f"torchvision {report.torchvision} is not the official pair of torch {report.torch} ({official}); "
            "all checks pass, as in images whose torchvision was built against that very torch"
        )
    nms = report.checks.get("nms")
    if nms is not None and nms.absent:
        found.append(f"torchvision {report.torchvision} has no operators (nms, roi_align): they were added in 0.3")
    return found


def _import_fault(report: Report, error: str) -> Fault:
    """torchvision hides why its library failed to load; the probe's `library` check shows it."""
    library = report.checks.get("library")
    hidden = library.error if library is not None and not library.ok else ""
    what = f"torchvision {report.torchvision} cannot be imported"
    if "operator torchvision::nms does not exist" in error:
        what = "operator torchvision::nms does not exist"
    shown = " / ".join(filter(None, (error, hidden)))
    return Fault("torchvision", what, _library_cause(report, hidden or error), shown)


def _library_cause(report: Report, error: str) -> str:
    missing, installed = _MISSING_LIBRARY.search(error), f"torchvision {report.torchvision}"
    if missing and not report.cuda and _CUDA_LIBRARY.search(missing[1]):
        return f"torch {report.torch} is built for CPU, {installed} is a wheel for CUDA"
    if missing and "cudart" in missing[1]:
        return f"{installed} was built for another CUDA: {missing[1]} is missing; {_official(report)}"
    if missing:
        return f"{missing[1]} is missing"
    if not report.cuda and "undefined symbol" not in error and "nms" in error:
        return f"torch {report.torch} is built for CPU, {installed} is a wheel for CUDA"
    return _import_cause(error) or _pairing(report)


def _import_cause(error: str) -> str:
    module = _MISSING_MODULE.search(error)
    if module:
        return f"its requirement {module[1]} is not installed"
    if error.startswith("crashed"):
        return error
    return ""


def _pairing(report: Report) -> str:
    return f"torchvision {report.torchvision} was built for another torch; {_official(report)}"


def _official(report: Report) -> str:
    return f"{versions.torchvision_for(report.torch)} belongs to torch {report.torch}"


def _vgg_fault(report: Report, error: str) -> Fault:
    version = versions.numbers(report.torchvision)
    if version is not None and version < versions.VGG_ADAPTIVE and _SHAPES.search(error):
        why = f"torchvision {report.torchvision} < 0.2.2 feeds its classifier from 224x224 images only"
        return Fault("torchvision", "VGG without adaptive pool", why, error)
    return Fault("torchvision", "torchvision's VGG16 fails on a 32x32 image", _import_cause(error), error)
