"""images/install.sh with a pip and a git that record their calls: the exact commands of every repair."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.image.names import asset
from train.data import roi

SCRIPT = Path(__file__).parents[2] / "images" / "install.sh"
PYTHON = f"""#!/bin/sh
if [ "$1 $2" = "-m pip" ]; then
  shift 2
  case "$1" in show) [ "$2" = torch ] && echo "Version: $TORCH_AS_PIP_SAYS"; exit 0 ;; esac
  echo "pip $* | constraint=${{PIP_CONSTRAINT-unset}} pytorch=${{PYTORCH_VERSION-unset}} cuda=${{FORCE_CUDA-unset}}" \\
    "version=${{BUILD_VERSION-unset}}" >>"$RECORD"
  [ -z "${{PIP_CONSTRAINT-}}" ] || sed 's/^/  | /' "$PIP_CONSTRAINT" >>"$RECORD"
  eval "$PIP_DOES"
  exit
fi
if [ "$*" = "-c import torchvision" ]; then exit "$IMPORT_ENDS"; fi
exec "{sys.executable}" "$@"
"""
TOOL = '#!/bin/sh\necho "$(basename "$0") $*" >>"$RECORD"\n[ "$1" != clone ] || mkdir -p "$7"\n'


@pytest.fixture
def install(tmp_path):
    """Runs a step in an image with this torch; returns exit code, output and the commands that it ran."""
    tools = tmp_path / "bin"
    torch = tmp_path / "site" / "torch"
    for folder in (tools, torch):
        folder.mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text("__version__ = '2.6.0a0+ecf3bae40a.nv25.01'\ngit_version = 'ecf3bae'\n")

    def run(*argv, tools_there=("git", "nvcc"), **environment):
        for name, text in {"python3": PYTHON, **dict.fromkeys(tools_there, TOOL)}.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        record = tmp_path / "record"
        record.write_text("")
        done = subprocess.run(
            ["sh", str(SCRIPT), *argv],
            capture_output=True,
            text=True,
            timeout=120,
            env={
                "PATH": f"{tools}:/usr/bin:/bin",
                "PYTHONPATH": str(tmp_path / "site"),
                "RECORD": str(record),
                "PIP_DOES": ":",
                "IMPORT_ENDS": "0",
                "TORCH_AS_PIP_SAYS": "2.6.0a0+ecf3bae40a.nv25.1",
                "TMPDIR": str(tmp_path),
                **environment,
            },
            check=False,
        )
        commands = record.read_text().replace(str(tmp_path), "TMP").splitlines()
        return done.returncode, done.stdout + done.stderr, commands

    return run


PLAIN = "constraint= pytorch=unset cuda=unset version=unset"


def test_keep_runs_nothing(install):
    assert install("torchvision", "keep") == (0, "launcher: torchvision stays as it is\n", [])


def test_a_wheel_is_installed_without_its_requirements(install):
    code, _, commands = install("torchvision", "wheel", "0.29.1", "cu130")
    assert code == 0
    assert commands == [
        f"pip uninstall -y torchvision | {PLAIN}",
        f"pip install --no-deps torchvision==0.29.1 | {PLAIN}",
    ]


def test_a_mismatched_wheel_is_followed_by_the_one_for_this_cuda(install):
    _, _, commands = install("torchvision", "wheel", "0.21.0", "cu118", IMPORT_ENDS="1")
    assert commands[-1] == (
        "pip install --no-deps --force-reinstall --index-url https://download.pytorch.org/whl/cu118 "
        f"torchvision==0.21.0+cu118 | {PLAIN}"
    )


def test_a_cpu_wheel_comes_only_from_pytorchs_own_index(install):
    _, _, commands = install("torchvision", "wheel", "0.28.0", "cpu")
    assert [command.split(" | ")[0] for command in commands] == [
        "pip uninstall -y torchvision",
        "pip install --no-deps --force-reinstall --index-url https://download.pytorch.org/whl/cpu "
        "torchvision==0.28.0+cpu",
    ]


def test_a_source_build_against_nvidias_torch(install):
    code, _, commands = install("torchvision", "source", "0.21.0", PYTORCH_VERSION="2.6.0a0+ecf3bae40a")
    assert code == 0
    assert commands[1:] == [
        "git clone --depth 1 --branch v0.21.0 https://github.com/pytorch/vision /tmp/vision",
        "pip uninstall -y torchvision | constraint= pytorch=2.6.0a0+ecf3bae40a cuda=unset version=unset",
        "pip install --no-deps --no-build-isolation -v . | constraint= pytorch=unset cuda=1 version=0.21.0",
    ]


def test_the_images_source_tree_is_built_without_a_clone_and_kept(install, tmp_path):
    tree = tmp_path / "vision"
    tree.mkdir()
    _, _, commands = install("torchvision", "source", "0.21.0", str(tree), tools_there=())
    assert [command.split(" | ")[0] for command in commands[1:]] == [
        "pip uninstall -y torchvision",
        "pip install --no-deps --no-build-isolation -v .",
    ]
    assert "cuda=0" in commands[-1]  # no nvcc
    assert tree.is_dir()


@pytest.mark.parametrize("base", ["missing", "empty", "filled", "none"])
def test_packages_obey_the_bases_constraints_with_torch_pinned(install, tmp_path, base):
    (tmp_path / "requirements.txt").write_text("six\n")
    environment = {} if base == "none" else {"PIP_CONSTRAINT": str(tmp_path / "constraint.txt")}
    if base in ("empty", "filled"):
        text = "numpy==1.26.4\ntorch==2.6.0a0+ecf3bae40a\ntorchvision @ file:///x.whl\ntorchmetrics==1.0\n"
        (tmp_path / "constraint.txt").write_text(text if base == "filled" else "")
    code, said, commands = install("packages", str(tmp_path / "requirements.txt"), **environment)
    assert code == 0, said
    assert commands[0].startswith("pip install -r TMP/requirements.txt")
    kept = ["  | numpy==1.26.4", "  | torchmetrics==1.0"] if base == "filled" else []
    assert commands[1:] == [*kept, "  | torch==2.6.0a0+ecf3bae40a.nv25.1"]


def test_no_packages_runs_nothing(install):
    assert install("packages", str(SCRIPT.with_name("requirements.txt")))[2] == []


def test_a_step_that_replaces_torch_fails_with_a_message(install, tmp_path):
    (tmp_path / "requirements.txt").write_text("evil\n")
    replace = f"echo \"__version__ = '2.6.0'\" >{tmp_path}/site/torch/version.py"
    code, said, _ = install("packages", str(tmp_path / "requirements.txt"), PIP_DOES=replace)
    assert code == 1
    assert "torch was replaced: it was '2.6.0a0+ecf3bae40a.nv25.01'" in said


def test_packages_go_into_an_image_whose_python_is_managed_by_the_system(install):
    """PEP 668: pip refuses there, as in Ubuntu 24.04, unless it is told otherwise."""
    refuses = '[ "$PIP_BREAK_SYSTEM_PACKAGES" = 1 ] || { echo "error: externally-managed-environment"; exit 1; }'
    assert install("torchvision", "wheel", "0.29.1", "cu130", PIP_DOES=refuses)[0] == 0


def test_a_failing_pip_fails_the_step(install):
    assert install("torchvision", "wheel", "9.9.9", "cu130", PIP_DOES="exit 1")[0] != 0


def test_an_unknown_step_is_refused(install):
    assert install("torchvision", "guess")[0] == 1


def test_the_dockerfile_follows_the_rules_that_matter():
    """hadolint DL3006, DL3007 (no latest), DL3020 (no ADD), DL3042 (no cache), DL3002 (the base's own user last)."""
    lines = [line for line in asset("Dockerfile").splitlines() if line and not line.startswith("#")]
    instructions = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert instructions[:2] == ["ARG", "FROM"]
    assert not {"ADD", "MAINTAINER"} & set(instructions)
    assert ":latest" not in asset("Dockerfile")
    assert lines[-1] == "USER ${RUN_USER}"
    assert "--mount" not in asset("Dockerfile")  # the classic builder builds it too
    assert "PIP_NO_CACHE_DIR=1" in asset("install.sh")


def test_scripts_parse_in_a_plain_shell():
    assert subprocess.run(["sh", "-n", str(SCRIPT)], env=dict(os.environ), check=False).returncode == 0


def test_the_decoder_in_an_image_is_where_the_trainer_looks_for_it(tmp_path, monkeypatch):
    """images/decoder.sh builds what train/data/roi.py would build, with its libjpeg beside it."""
    if shutil.which("cc") is None or not Path("/usr/include/jpeglib.h").exists():
        pytest.skip("no C compiler, or no libjpeg-turbo")
    script = Path(__file__).parents[2] / "images" / "decoder.sh"
    done = subprocess.run(["sh", str(script), str(roi.SOURCE), str(tmp_path / "made")], check=False)
    assert done.returncode == 0
    monkeypatch.setattr(roi, "IN_IMAGE", tmp_path / "made")
    assert roi.load().path == tmp_path / "made" / roi.file_name()
    assert any(path.name.startswith("libjpeg") for path in (tmp_path / "made").iterdir())
    assert f"cc {' '.join(roi.FLAGS)} " in script.read_text()


def test_without_a_compiler_the_build_goes_on_without_the_decoder(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "sha256sum", "cut", "uname", "mkdir", "rm"):
        (tools / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        ["sh", str(Path(__file__).parents[2] / "images" / "decoder.sh"), str(roi.SOURCE), str(tmp_path / "made")],
        env={"PATH": str(tools)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "it will decode with torchvision" in done.stdout
    assert list((tmp_path / "made").iterdir()) == []
