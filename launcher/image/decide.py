"""What to do about an image's torchvision: a pure function of what the job asks for and what the probe found."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.errors import ImageUnfit
from launcher.image import versions
from launcher.image.faults import Fault, Report, find_faults, find_notes

KEEP = "keep"


@dataclass(frozen=True)
class Decision:
    """What to do and why."""

    step: str  # for `install.sh torchvision`: keep | wheel X.Y.Z [cu124] | source X.Y.Z [FOLDER]
    why: str
    version: str = ""  # that gets installed
    notes: tuple[str, ...] = ()


def decide(asked: str, report: Report, image: str, mounted: bool = False) -> Decision:
    """`asked`: auto, keep or X.Y.Z. `mounted`: the job mounts folders, from which torch may come.

    Raises ImageUnfit, naming the fault, if the image cannot be made to work.
    """
    if asked == KEEP:
        return Decision(KEEP, "the job says keep: nothing was checked")
    faults = find_faults(report)
    notes = tuple(find_notes(report))
    _refuse_what_torchvision_cannot_fix(faults, image, mounted)
    if not report.torch_folder:
        return Decision(KEEP, "torch is not in the image: the job's mounts are used as they are")
    if asked == "auto" and faults:
        return _repair(report, image, "; ".join(map(str, faults)))
    if asked == "auto":
        return Decision(KEEP, f"torchvision {report.torchvision} works with torch {report.torch}", notes=notes)
    if not faults and versions.numbers(report.torchvision) == versions.numbers(asked):
        return Decision(KEEP, f"torchvision {report.torchvision} is installed and works", notes=notes)
    installed = report.torchvision or "none"
    return _install(asked, report, image, f"the job asks for torchvision {asked}, the base has {installed}")


def _refuse_what_torchvision_cannot_fix(faults: list[Fault], image: str, mounted: bool) -> None:
    for fault in faults:
        if fault.part == "torchvision" or (fault.part == "torch" and not fault.error and mounted):
            continue
        shown = f"{fault} [{fault.error}]" if fault.error else str(fault)
        cure = "choose a base with a torch that works, or set image.torchvision to keep if the job needs none"
        raise ImageUnfit(f"image {image}", shown, cure)


def _repair(report: Report, image: str, why: str) -> Decision:
    """Install the torchvision that belongs to this torch, in the way that this torch allows."""
    torch = versions.numbers(report.torch)
    version = versions.torchvision_for(report.torch)
    if version is None or torch is None:
        what = f"{why}; no torchvision is known for torch {report.torch}"
        raise ImageUnfit(f"image {image}", what, "set image.torchvision to a version that is known to fit")
    installed = versions.numbers(report.torchvision)
    if not versions.published(report.torch) and torch < (1, 2, 0) and installed is not None and installed < (0, 3, 0):
        # The installed torchvision has no compiled operators either, and this one needs no compiler.
        version = versions.PURE_PYTHON
    return _install(version, report, image, why)


def _install(version: str, report: Report, image: str, why: str) -> Decision:
    if not report.pip:
        what = f"{why}; and the image has no pip to install torchvision {version} with"
        raise ImageUnfit(f"image {image}", what, "add pip to the base, or choose another one")
    wanted = versions.numbers(version)
    if wanted is not None and wanted < (0, 3, 0):
        pure = ("this torchvision is pure Python: it has no operators",)
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
            "use a base with a compiler, or one whose torchvision works",
        )
    notes: tuple[str, ...] = ()
    if report.cuda and "nvcc" not in report.tools:
        notes = ("the image has no nvcc: torchvision's operators will run on the CPU only",)
    return Decision(f"source {version} {folder}".strip(), why, version, notes)
