"""Packages that a job adds to its image: images/packages.py as it runs in the image, and what is made of its report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.image import packages
from launcher.image.probe import MARK

SCRIPT = Path(__file__).parents[2] / "images" / "packages.py"


def installed(site: Path, name: str, *requires: str, **modules: str) -> None:
    """Lay a package out as pip does."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}")
    for module, text in modules.items():
        (site / module).mkdir()
        (site / module / "__init__.py").write_text(text)
    (info / "RECORD").write_text("".join(f"{module}/__init__.py,,\n" for module in modules))


def examined(site: Path, *requirements: str) -> dict[str, Any]:
    """Run the script as in an image in which these packages alone are added."""
    argv = [sys.executable, "-c", SCRIPT.read_text(), "python3", *requirements]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=True, timeout=120, cwd=site, env={"PYTHONPATH": str(site)}
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    found: dict[str, Any] = json.loads(line[len(MARK) :])
    return found


def test_each_package_is_imported_by_the_names_that_it_installs(tmp_path: Path) -> None:
    installed(tmp_path, "flash-attn", "surely-no-such-package-0>=2", flash_attn="import flash_attn_2_cuda", tests="1/0")
    installed(tmp_path, "works", works="x = 1")
    installed(tmp_path, "crashes", crashes="import os; os.abort()")
    installed(tmp_path, "leaves", leaves="raise SystemExit(3)")
    installed(tmp_path, "nvidia-dali-cuda120")  # its modules are in a namespace
    found = examined(
        tmp_path, "flash-attn==2.6.3", "nvidia-dali-cuda120",
        "works[extra] >= 1 ; python_version > '3'", "crashes", "leaves", "absent",
        "git+https://example.org/x.git",
    )  # fmt: skip
    assert found["imports"] == {
        "flash-attn": "import flash_attn: ModuleNotFoundError: No module named 'flash_attn_2_cuda'",
        "works": "",
        "crashes": "import crashes crashed with signal 6",
        "leaves": "import leaves: exit code 3",
    }
    assert found["unknown"] == ["nvidia-dali-cuda120", "absent", "git+https://example.org/x.git"]
    assert any("flash-attn 1.0 requires surely-no-such-package-0" in line for line in found["conflicts"])


REPORT = {
    "imports": {
        "works": "",
        "flash-attn": "import flash_attn: ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E",
        "transformer-engine": "import transformer_engine: OSError: libcuda.so.1: cannot open shared object file",
    },
    "unknown": ["git+https://example.org/x.git"],
    "conflicts": ["old 1 requires numpy<2, but you have numpy 2.1.", "torchaudio 2.5 requires torch==2.5, but you ..."],
}


@pytest.mark.parametrize("gpu", [False, True])
def test_what_needs_a_gpu_is_a_fault_only_if_there_was_one(gpu: bool) -> None:
    faults, notes = packages.faults(REPORT, gpu=gpu), list(packages.notes(REPORT, {REPORT["conflicts"][0]}, gpu=gpu))
    assert faults[0].startswith("package flash-attn cannot be imported: import flash_attn: ImportError: ")
    assert ["transformer-engine" in fault for fault in faults[1:]] == [True] * gpu
    assert ("package transformer-engine was not checked" in " ".join(notes)) is not gpu
    assert "package git+https://example.org/x.git was not imported, as the name of its module is not known" in notes
    assert [note for note in notes if note.startswith("pip check: ")] == [f"pip check: {REPORT['conflicts'][1]}"]


def test_an_image_without_python_has_nothing_to_say() -> None:
    assert packages.faults({"python": ""}, gpu=True) == []
    assert list(packages.notes({"python": ""}, set(), gpu=True)) == []
