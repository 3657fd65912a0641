"""images/probe.py as it runs inside an image, with fake packages that are laid out like real ones."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.image.faults import Report, find_faults
from launcher.image.probe import FIND_PYTHON, MARK
from launcher.image.repair import ImageVerdict

SCRIPT = Path(__file__).parents[2] / "images" / "probe.py"
RUN_PY = """
def get_args_parser():
    parser = ArgumentParser(description="Torch Distributed Elastic Training Launcher")
    parser.add_argument("--nnodes", action=env, type=str, default="1:1", help="see --not-an-option")
    parser.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        action=env,
    )
    parser.add_argument("-m", "--module", action=check_env)
    parser.add_argument("--no_python", action=check_env)
    raise ValueError("--rdzv-backend is missing")
"""


@pytest.fixture
def probe(tmp_path):
    """Runs the script in an environment where only these files can be imported."""

    def run(mode, files, before=""):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        done = subprocess.run(
            [sys.executable, "-S", "-c", before + SCRIPT.read_text(), "python3", mode],
            capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(tmp_path)}, check=True,
        )  # fmt: skip
        [line] = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        return Report.from_json(json.loads(line[len(MARK) :]))

    return run


TORCH = {
    "torch/__init__.py": "raise RuntimeError('the facts probe must not import torch')",
    "torch/version.py": "__version__ = '2.6.0a0+ecf3bae40a.nv25.01'\ncuda: Optional[str] = '12.8'\n",
    "torch/distributed/run.py": RUN_PY,
    "torch/distributed/launch.py": "",
}


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("cuda: _Optional[str] = '13.0'", "13.0"),  # torch 2.9
        ("cuda = '10.1'", "10.1"),  # 1.4
        ("cuda: Optional[str] = None", ""),  # built for CPU
    ],
)
def test_the_facts_probe_reads_the_cuda_of_torch(probe, line, version):
    assert probe("facts", {**TORCH, "torch/version.py": f"__version__ = '2'\n{line}\nhip = '5'\n"}).cuda == version


def test_the_facts_probe_reads_versions_and_options_without_imports(probe):
    found = probe("facts", TORCH)
    assert (found.torch, found.run, found.launch) == ("2.6.0a0+ecf3bae40a.nv25.01", True, False)
    assert found.flags == {"nnodes", "nproc_per_node", "module", "no_python"}
    assert not found.checks


def test_torch_before_torchrun(probe):
    old = {
        "torch/__init__.py": "",
        "torch/version.py": "__version__ = '1.1.0a0+0885dd28'\n",
        "torch/distributed/launch.py": 'parser.add_argument("--nnodes", type=int)\nparser.add_argument("--use_env")\n',
    }
    found = probe("facts", old)
    assert (found.run, found.launch, found.flags) == (False, True, {"nnodes", "use_env"})


def test_no_torch(probe):
    found = probe("full", {})
    assert (found.torch, found.run, found.launch) == ("", False, False)
    assert str(find_faults(found)[0]) == "the image has no torch"


def test_a_type_annotated_version_as_in_newer_torchvisions(probe):
    found = probe("facts", {"torchvision/__init__.py": "", "torchvision/version.py": "__version__: str = '0.9'\n"})
    assert found.torchvision == "0.9"


def test_a_crashing_library_is_a_result(probe):
    crash = {
        **TORCH,
        "torch/__init__.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    }
    found = probe("full", crash)
    assert found.checks["import_torch"].error == "crashed with signal 11 (SIGSEGV)"
    assert "cannot be imported: crashed with signal 11" in str(find_faults(found)[0])


def test_a_package_that_exits_is_a_result(probe):
    found = probe("full", {**TORCH, "torch/__init__.py": "raise SystemExit('no licence')"})
    assert found.checks["import_torch"].error == "SystemExit: no licence"


def test_an_error_is_reported_with_its_cause(probe):
    hidden = (
        "try:\n    raise OSError('libtorch_cuda.so: missing')\nexcept OSError as e:\n    raise ImportError('no') from e"
    )
    found = probe("full", {**TORCH, "torch/__init__.py": hidden})
    assert found.checks["import_torch"].error == "ImportError: no <- OSError: libtorch_cuda.so: missing"


ASKED_FOR_PIP = """
import sys

class Finder:
    def find_spec(self, name, *_):
        sys.asked_for_pip = name == "pip" or sys.asked_for_pip

sys.asked_for_pip = False
sys.meta_path.insert(0, Finder())
"""


def test_torch_is_imported_before_pip_is_looked_for(probe):
    """setuptools then puts Python's distutils in place of its own, and torch 2.4, which imports it, fails."""
    torch = "import sys\nraise RuntimeError(f'asked for pip: {sys.asked_for_pip}')"
    found = probe("full", {**TORCH, "torch/__init__.py": torch}, ASKED_FOR_PIP)
    assert found.checks["import_torch"].error == "RuntimeError: asked for pip: False"


@pytest.mark.ci
def test_the_real_torch_of_this_environment_passes():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "python3", "full"], capture_output=True, text=True, timeout=280, check=True
    )
    found = Report.from_json(json.loads(done.stdout.split(MARK)[1]))
    if not found.torch:
        pytest.skip("no torch in this environment")
    verdict = ImageVerdict("this environment", found)
    verdict.check()
    assert ("VGG16 on 32x32", "", "ok") in verdict.rows()


@pytest.mark.parametrize(
    ("having", "with_torch", "used"),
    [
        (["python3", "python"], "python", "python"),
        (["python3", "python"], "python3", "python3"),
        (["python3", "python"], "", "python3"),
        (["python3"], "", "python3"),
        (["python"], "", "python"),
        ([], "", ""),
    ],
)
def test_the_python_that_has_torch_is_used(having, with_torch, used, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "bin").mkdir()
    for tool in ("sh", "readlink"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    for name in having:
        own = f"PYTHONPATH={tmp_path}" if name == with_torch else "PYTHONPATH="
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\n{own} exec {sys.executable} -S "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    argv = ["sh", "-c", FIND_PYTHON, SCRIPT.read_text(), "facts"]
    done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": str(tmp_path / "bin")}, check=True)
    [line] = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    found = Report.from_json(json.loads(line[len(MARK) :]))
    assert found.python == used
    assert bool(found.torch_folder) == bool(with_torch)
