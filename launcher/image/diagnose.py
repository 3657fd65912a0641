"""From what the probe tried to what is wrong, in words that a user can act on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.image import versions
from launcher.image.report import Report

_SHAPES = re.compile(r"(?:mat1 and mat2 shapes cannot be multiplied|size mismatch)")
_MISSING_LIBRARY = re.compile(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file")
_CUDA_LIBRARY = re.compile(r"torch_cuda|c10_cuda|cudart|cublas|cudnn|libnv")
_MISSING_MODULE = re.compile(r"No module named '?([\w.]+)'?")


@dataclass(frozen=True)
class Fault:
    """`what` fails, `why` as far as it shows, `error` in the image's words. `part`: python, torch or torchvision."""

    part: str
    what: str
    why: str = ""
    error: str = ""

    def __str__(self) -> str:
        return self.what + (f": {self.why}" if self.why else "")


def faults(report: Report) -> list[Fault]:
    """What does not work, by a full probe; empty where everything does."""
    if not report.python:
        return [Fault("python", "the image has no Python", "neither python3 nor python is on its PATH")]
    if not report.torch_folder:
        return [Fault("torch", "the image has no torch")]
    assert report.checks is not None, "only a full probe tells"
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
            place = "on the GPU" if name == "nms_gpu" else "on the CPU"
            found.append(Fault("torchvision", f"torchvision.ops.nms fails {place}", _pairing(report), check.error))
    vgg = report.checks.get("vgg16")
    if vgg is not None and not vgg.ok:
        found.append(_vgg_fault(report, vgg.error))
    return found


def notes(report: Report) -> list[str]:
    """What is unusual and yet no fault."""
    if not report.torch or not report.torchvision:
        return []
    said = []
    if versions.belong_together(report.torch, report.torchvision) is False:
        official = versions.torchvision_for(report.torch)
        said.append(
            f"torchvision {report.torchvision} is not the official pair of torch {report.torch} ({official}); "
            "what was tried works, as in images whose torchvision was built against that very torch"
        )
    nms = (report.checks or {}).get("nms")
    if nms is not None and nms.absent:
        said.append(f"torchvision {report.torchvision} has no operators (nms, roi_align): they came with 0.3")
    return said


def _import_fault(report: Report, error: str) -> Fault:
    """torchvision hides why its library did not load: the probe's `library` check shows it."""
    library = (report.checks or {}).get("library")
    hidden = library.error if library is not None and not library.ok else ""
    what = f"torchvision {report.torchvision} cannot be imported"
    if "operator torchvision::nms does not exist" in error:
        what = "operator torchvision::nms does not exist"
    return Fault(
        "torchvision", what, _library_cause(report, hidden or error), " / ".join(filter(None, (error, hidden)))
    )


def _library_cause(report: Report, error: str) -> str:
    missing, there = _MISSING_LIBRARY.search(error), f"torchvision {report.torchvision}"
    if missing and not report.cuda and _CUDA_LIBRARY.search(missing[1]):
        return f"torch {report.torch} is built for CPU, {there} is a wheel for CUDA"
    if missing and "cudart" in missing[1]:
        return f"{there} was built for another CUDA: {missing[1]} is missing; {_official(report)}"
    if missing:
        return f"{missing[1]} is missing"
    if not report.cuda and "undefined symbol" not in error and "nms" in error:
        return f"torch {report.torch} is built for CPU, {there} is a wheel for CUDA"
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
    there = versions.numbers(report.torchvision)
    if there is not None and there < versions.VGG_ADAPTIVE and _SHAPES.search(error):
        why = f"torchvision {report.torchvision} < 0.2.2 feeds its classifier from 224x224 images only"
        return Fault("torchvision", "VGG without adaptive pool", why, error)
    return Fault("torchvision", "torchvision's VGG16 fails on a 32x32 image", _import_cause(error), error)
