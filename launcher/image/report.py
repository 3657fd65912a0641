"""What the probe found in an image, as values, and what is wrong with it, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MARK = "LAUNCHER-PROBE "  # images/probe.py prints it in front of its JSON


@dataclass(frozen=True)
class Check:
    """One thing that was tried. `absent`: there is nothing to try, as with operators before torchvision 0.3."""

    ok: bool
    error: str = ""
    absent: bool = False


@dataclass(frozen=True)
class Report:
    """What images/probe.py says. The second half is filled by a full probe only."""

    python: str  # what the interpreter is called; "" where the image has none
    python_version: str
    torch: str  # as torch/version.py says, "" where there is none
    torch_folder: str
    torchvision: str
    torchvision_folder: str
    run: bool
    launch: bool
    flags: frozenset[str]
    full: bool = False
    pip: str = ""
    constraint_file: str = ""
    constraint_pins: Mapping[str, str] | None = None  # None: the file is missing
    tools: tuple[str, ...] = ()
    source_tree: str = ""
    cuda: str = ""
    cuda_available: bool = False
    arch_list: tuple[str, ...] = ()
    checks: Mapping[str, Check] | None = None

    @classmethod
    def empty(cls) -> Report:
        """Of an image that was not looked into."""
        return from_json({"python": ""})


def from_json(found: Mapping[str, Any]) -> Report:
    """A report from the probe's JSON object."""
    checks: Mapping[str, Any] | None = found.get("checks")
    imported: Mapping[str, Any] = (checks or {}).get("import_torch", {})
    return Report(
        python=found["python"],
        python_version=found.get("python_version", ""),
        torch=found.get("torch", ""),
        torch_folder=found.get("torch_folder", ""),
        torchvision=found.get("torchvision", ""),
        torchvision_folder=found.get("torchvision_folder", ""),
        run=bool(found.get("run")),
        launch=bool(found.get("launch")),
        flags=frozenset(found.get("flags", ())),
        full=checks is not None,
        pip=found.get("pip", ""),
        constraint_file=found.get("constraint_file", ""),
        constraint_pins=dict(found.get("constraint_pins", {})) if found.get("constraint_exists") else None,
        tools=tuple(found.get("tools", ())),
        source_tree=found.get("source_tree", ""),
        cuda=imported.get("cuda", ""),
        cuda_available=bool(imported.get("cuda_available")),
        arch_list=tuple(imported.get("arch_list", ())),
        checks=None
        if checks is None
        else {
            name: Check(bool(check.get("ok")), check.get("error", ""), bool(check.get("absent")))
            for name, check in checks.items()
        },
    )
