"""Proof that an image does what it is for: before | after, and torch the very same build."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.errors import ImageUnfit
from launcher.image import diagnose
from launcher.image.probe import full_report
from launcher.image.report import Report
from launcher.node.engine import Engine, ImageInfo

CHECKS = {
    "import_torch": "import torch",
    "import_torchvision": "import torchvision",
    "nms": "ops.nms",
    "nms_gpu": "ops.nms on the GPU",
    "vgg16": "VGG16 on 32x32",
}


@dataclass(frozen=True)
class Verdict:
    """What an image does, beside what its base did where there is one."""

    image: str
    after: Report
    before: Report | None = None

    def rows(self) -> list[tuple[str, str, str]]:
        """(what, before, after), ready for a table; `before` is "" where there is nothing to compare with."""
        return [(name, self._before(name), value) for name, value in _values(self.after).items()]

    def _before(self, name: str) -> str:
        return _values(self.before).get(name, "") if self.before is not None else ""

    def faults(self) -> list[str]:
        """What is wrong with it; empty where everything works."""
        found = [str(fault) + (f" [{fault.error}]" if fault.error else "") for fault in diagnose.faults(self.after)]
        if self.before is not None and self.before.torch != self.after.torch:
            found.append(f"torch was replaced: {self.before.torch} before, {self.after.torch or 'none'} now")
        return found

    def check(self) -> None:
        """Raises ImageUnfit where something is wrong."""
        found = self.faults()
        if found:
            raise ImageUnfit(f"image {self.image}", "; ".join(found), "launcher image verify shows what was tried")


def verify(engine: Engine, info: ImageInfo, name: str, before: Report | None = None) -> Verdict:
    """Try the image in a container on `engine`; a warm call costs nothing. Raises ImageUnfit where none runs."""
    return Verdict(name, full_report(engine, info, name), before)


def _values(report: Report) -> dict[str, str]:
    shown = {
        "python": report.python_version or "none",
        "torch": report.torch or "none",
        "CUDA of torch": report.cuda or "none",
        "torchvision": report.torchvision or "none",
    }
    for name, check in (report.checks or {}).items():
        if name in CHECKS:
            shown[CHECKS[name]] = ("absent" if check.absent else "ok") if check.ok else check.error.splitlines()[0]
    return shown
