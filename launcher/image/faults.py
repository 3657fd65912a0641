"""Find faults in a probe's report of an image, describe them, and decide on the repair.

Pure functions of the job's image section and the probe's report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from launcher.errors import ImageUnfit
from launcher.faults.table import MISSING_LIBRARY
from launcher.image import versions

KEEP = "keep"

_SHAPES = re.compile(r"(?:mat1 and mat2 shapes cannot be multiplied|size mismatch)")
_MISSING_LIBRARY = re.compile(MISSING_LIBRARY)
_CUDA_LIBRARY = re.compile(r"torch_cuda|c10_cuda|cudart|cublas|cudnn|libnv")
_MISSING_MODULE = re.compile(r"No module named '?([\w.]+)'?")


@dataclass(frozen=True)
class ImageCheck:
    """Result of one check. absent: the image lacks the feature, such as operators before torchvision 0.3."""

    ok: bool
    error: str = ""
    absent: bool = False


@dataclass(frozen=True)
class Report:
    """Output of images/probe.py; the fields from `pip` on are set by a full probe only."""

    python: str  # name of the interpreter; "" if the image has none
    python_version: str = ""
    torch: str = ""  # from torch/version.py, "" if not installed
    torch_folder: str = ""
    torchvision: str = ""
    torchvision_folder: str = ""
    run: bool = False
    launch: bool = False
    flags: frozenset[str] = frozenset()
    pip: str = ""
    tools: tuple[str, ...] = ()
    source_tree: str = ""
    cuda: str = ""  # CUDA version of torch, also set by a quick probe
    code: tuple[str, ...] = ()  # names in the image's /workspace/code, also set by a quick probe
    decoder: str = ""  # see ImageFacts, also set by a quick probe
    checks: Mapping[str, ImageCheck] = field(default_factory=dict)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Report:
        checks: Mapping[str, Mapping[str, Any]] = found.get("checks") or {}
        values = {field.name: found[field.name] for field in fields(cls) if field.name in found}
        values["flags"], values["tools"] = frozenset(found.get("flags", ())), tuple(found.get("tools", ()))
        values["code"] = tuple(map(str, found.get("code", ())))
        values["cuda"] = checks["import_torch"].get("cuda", "") if "import_torch" in checks else found.get("cuda", "")
        values["checks"] = {
            name: ImageCheck(bool(check.get("ok")), check.get("error", ""), bool(check.get("absent")))
            for name, check in checks.items()
        }
        return cls(**values)


@dataclass(frozen=True)
class ImageFault:
    """A fault, its cause if known, and the image's own error message. part: python, torch or torchvision."""

    part: str
    what: str
    why: str = ""
    error: str = ""

    def __str__(self) -> str:
        return self.what + (f": {self.why}" if self.why else "")

    @property
    def with_error(self) -> str:
        return f"{self} [{self.error}]" if self.error else str(self)


def find_faults(report: Report) -> list[ImageFault]:
    """Return the faults that a full probe found."""
    if not report.python:
        return [ImageFault("python", "the image has no Python", "neither python3 nor python is on its PATH")]
    if not report.torch_folder:
        return [ImageFault("torch", "the image has no torch")]
    assert report.checks, "needs a full probe"
    torch = report.checks.get("import_torch", ImageCheck(ok=False))
    if not torch.ok:
        return [
            ImageFault("torch", f"torch {report.torch} cannot be imported", _import_cause(torch.error), torch.error)
        ]
    if not report.torchvision_folder:
        return [ImageFault("torchvision", "the image has no torchvision")]
    vision = report.checks["import_torchvision"]
    if not vision.ok:
        return [_import_fault(report, vision.error)]
    found = []
    for name, device in (("nms", "CPU"), ("nms_gpu", "GPU")):
        check = report.checks.get(name, ImageCheck(ok=True))
        if not check.ok:
            what = f"torchvision.ops.nms fails on the {device}"
            found.append(ImageFault("torchvision", what, _pairing(report), check.error))
    vgg = report.checks.get("vgg16", ImageCheck(ok=True))
    if not vgg.ok:
        found.append(_vgg_fault(report, vgg.error))
    return found


def find_notes(report: Report) -> list[str]:
    """Return unusual findings that are not faults."""
    if not report.torch or not report.torchvision:
        return []
    found = []
    if versions.belong_together(report.torch, report.torchvision) is False:
        official = versions.torchvision_for(report.torch)
        found.append(
            f"torchvision {report.torchvision} is not the official pair of torch {report.torch} ({official}); "
            "all checks pass, as in images with a torchvision built against their own torch"
        )
    if report.checks.get("nms", ImageCheck(ok=True)).absent:
        found.append(f"torchvision {report.torchvision} has no operators (nms, roi_align): they were added in 0.3")
    return found


def _import_fault(report: Report, error: str) -> ImageFault:
    """Describe a failed import. torchvision hides the loader's error; the probe's `library` check has it."""
    hidden = report.checks.get("library", ImageCheck(ok=True)).error
    what = f"torchvision {report.torchvision} cannot be imported"
    if "operator torchvision::nms does not exist" in error:
        what = "operator torchvision::nms does not exist"
    shown = " / ".join(filter(None, (error, hidden)))
    return ImageFault("torchvision", what, _library_cause(report, hidden or error), shown)


def _library_cause(report: Report, error: str) -> str:
    missing, installed = _MISSING_LIBRARY.search(error), f"torchvision {report.torchvision}"
    if missing and not report.cuda and _CUDA_LIBRARY.search(missing[1]):
        return f"torch {report.torch} is built for CPU, but {installed} for CUDA"
    if missing and "cudart" in missing[1]:
        return f"{installed} was built for another CUDA: {missing[1]} is missing; {_official(report)}"
    if missing:
        return f"{missing[1]} is missing"
    if not report.cuda and "undefined symbol" not in error and "nms" in error:
        return f"torch {report.torch} is built for CPU, but {installed} for CUDA"
    return _import_cause(error) or _pairing(report)


def _import_cause(error: str) -> str:
    if module := _MISSING_MODULE.search(error):
        return f"its requirement {module[1]} is not installed"
    return error if error.startswith("crashed") else ""


def _pairing(report: Report) -> str:
    return f"torchvision {report.torchvision} was built for another torch; {_official(report)}"


def _official(report: Report) -> str:
    return f"torch {report.torch} needs torchvision {versions.torchvision_for(report.torch)}"


def _vgg_fault(report: Report, error: str) -> ImageFault:
    version = versions.numbers(report.torchvision)
    if version is not None and version < versions.VGG_ADAPTIVE and _SHAPES.search(error):
        why = f"torchvision {report.torchvision} < 0.2.2 supports 224x224 images only"
        return ImageFault("torchvision", "VGG without adaptive pool", why, error)
    return ImageFault("torchvision", "torchvision's VGG16 fails on a 32x32 image", _import_cause(error), error)


@dataclass(frozen=True)
class Decision:
    """The repair step and its reason."""

    step: str  # for `install.sh torchvision`: keep | wheel X.Y.Z [cu124] | source X.Y.Z [FOLDER]
    why: str
    version: str = ""  # the version to install
    notes: tuple[str, ...] = ()


def decide(asked: str, report: Report, image: str, mounted: bool = False) -> Decision:
    """Decide on the repair. `asked`: auto, keep or X.Y.Z. `mounted`: the job mounts folders, which may contain torch.

    Raises ImageUnfit with the fault if the image cannot be repaired.
    """
    if asked == KEEP:
        return Decision(KEEP, "image.torchvision is keep: nothing was checked")
    faults = find_faults(report)
    notes = tuple(find_notes(report))
    for fault in faults:
        if fault.part != "torchvision" and not (mounted and fault.part == "torch" and not fault.error):
            fix = "choose a base with a working torch, or set image.torchvision to keep if the job does not need torch"
            raise ImageUnfit(f"image {image}", fault.with_error, fix)
    if not report.torch_folder:
        return Decision(KEEP, "torch is not in the image: the job's mounts are used unchanged")
    if asked == "auto" and faults:
        return _repair(report, image, "; ".join(map(str, faults)))
    if asked == "auto":
        return Decision(KEEP, f"torchvision {report.torchvision} works with torch {report.torch}", notes=notes)
    if not faults and versions.numbers(report.torchvision) == versions.numbers(asked):
        return Decision(KEEP, f"torchvision {report.torchvision} is installed and works", notes=notes)
    why = f"the job asks for torchvision {asked}, the base has {report.torchvision or 'none'}"
    return _install(asked, report, image, why)


def _repair(report: Report, image: str, why: str) -> Decision:
    """Install the torchvision that matches this torch."""
    torch = versions.numbers(report.torch)
    version = versions.torchvision_for(report.torch)
    if version is None or torch is None:
        what = f"{why}; no matching torchvision is known for torch {report.torch}"
        raise ImageUnfit(f"image {image}", what, "set image.torchvision to a matching version")
    installed = versions.numbers(report.torchvision)
    if not versions.published(report.torch) and torch < (1, 2, 0) and installed is not None and installed < (0, 3, 0):
        # The installed torchvision has no compiled operators either, and this one needs no compiler.
        version = versions.PURE_PYTHON
    return _install(version, report, image, why)


def _install(version: str, report: Report, image: str, why: str) -> Decision:
    if not report.pip:
        what = f"{why}; the image has no pip to install torchvision {version}"
        raise ImageUnfit(f"image {image}", what, "add pip to the base, or choose another base")
    wanted = versions.numbers(version)
    if wanted is not None and wanted < (0, 3, 0):
        pure = ("this torchvision is pure Python and has no operators",)
        return Decision(f"wheel {version}", why, version, pure)
    if versions.published(report.torch):
        variant = versions.variant(report.torch) if report.cuda else "cpu"
        return Decision(f"wheel {version} {variant}".strip(), why, version)
    official = versions.torchvision_for(report.torch)
    folder = report.source_tree if official is not None and wanted == versions.numbers(official) else ""
    lacking = [tool for tool in ("g++", *(() if folder else ("git",))) if tool not in report.tools]
    if lacking:
        raise ImageUnfit(
            f"image {image}",
            f"{why}; torch {report.torch} is not a published release, so torchvision must be built from source, "
            f"and the image lacks {' and '.join(lacking)}",
            "use a base with a compiler, or with a working torchvision",
        )
    notes: tuple[str, ...] = ()
    if report.cuda and "nvcc" not in report.tools:
        notes = ("the image has no nvcc: torchvision's operators will run on the CPU only",)
    return Decision(f"source {version} {folder}".strip(), why, version, notes)
