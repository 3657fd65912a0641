"""House rules that no linter checks, and the cost of a start."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES_OF_HELP = 350  # 324 today, most of them of the library that reads the command line


def imported_by(code: str) -> set[str]:
    """Top-level names of all modules that Python has imported after running `code`."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys\n{code}\nprint(*[n for n, m in sys.modules.items() if m], file=sys.stderr)",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.partition(".")[0] for name in done.stderr.splitlines()[-1].split()}


def sources(package: str) -> Iterator[Path]:
    return (path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts)


def test_no_two_classes_of_the_launcher_have_the_same_name() -> None:
    places: dict[str, list[str]] = {}
    for path in sources("launcher"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("package", ["launcher", "train"])
def test_no_protocol_has_a_constructor(package: str) -> None:
    """Python 3.10 replaces it in the classes that inherit it, by one that does nothing."""
    for path in sources(package):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
                own = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                assert "__init__" not in own, f"{path}: {node.name}"


def test_the_launcher_makes_one_unix_socket() -> None:
    """Its path must be below 104 bytes on macOS; that of slurm/login.py has a test of its longest path.

    On Linux, that of a rank in breakpoint() and its client's are short whatever the folder is: /proc/self/fd.
    """
    makers = ("AF_UNIX", "ControlPath", '"-M"', "start_unix_server", "UnixStreamServer")
    found = {str(path.relative_to(ROOT)) for path in sources("launcher") if any(m in path.read_text() for m in makers)}
    connecting = {"launcher/node/docker/channel.py", "launcher/node/ssh/identities.py"}
    scripts = {f"launcher/container_scripts/{name}.py" for name in ("launcher_breakpoint", "debug_client")}
    assert found - {"launcher/features/slurm/login.py"} - scripts == connecting
    assert all("/proc/self/fd/" in (ROOT / path).read_text() for path in scripts)
    for path in connecting:
        assert ".bind(" not in (ROOT / path).read_text()


def test_help_imports_nothing_that_only_commands_need() -> None:
    loaded = imported_by(
        "from launcher.cli.main import main\nsys.argv = ['launcher', '--help']\ntry: main()\nexcept SystemExit: pass"
    )
    assert not loaded & {"torch", "docker", "paramiko", "pydantic", "yaml", "requests"}


def test_help_imports_little() -> None:
    """On an idle machine it takes 0.18 s of processor time, nearly all of it for these modules."""
    code = "from launcher.cli.main import main\nsys.argv = ['launcher', '--help']\ntry: main()\nexcept SystemExit: pass"
    counted = f"import sys\n{code}\nprint(len(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", counted], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stderr) < MODULES_OF_HELP


def test_no_command_imports_torch() -> None:
    code = (
        "import importlib\nfrom launcher.cli.main import COMMANDS\n"
        "for module, _, _ in COMMANDS.values(): importlib.import_module(module)\n"
        "import launcher.cli.up, launcher.run.begin.prepare, launcher.node.docker.engine, launcher.node.process.engine"
    )
    assert not imported_by(code) & {"torch", "torchvision", "tensorboard", "train", "numpy"}


def test_the_trainers_options_are_read_without_torch() -> None:
    """`plan` and `up` check them where torch may not be installed."""
    code = "import train.config\nfrom train.__main__ import main\nassert main(['--check', '--data', 'x']) == 0"
    assert not imported_by(code) & {"torch", "torchvision", "numpy"}


def test_plain_processes_need_neither_docker_nor_paramiko(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: none\nruntime: process\nnodes: [local, local]\nrun: {command: ['true']}\n")
    code = (
        "from pathlib import Path\n"
        "from launcher.job.loader import load_job\n"
        "from launcher.node.connect import connect\n"
        f"job = load_job(Path({str(job)!r}), [], None)\n"
        "with connect([(node.name, node.host) for node in job.nodes], job.runtime) as fleet:\n"
        "    fleet.facts()\n"
        "    fleet.engines[0].machine.reach('127.0.0.1', 1, 1)"
    )
    assert not imported_by(code) & {"docker", "requests", "urllib3", "paramiko", "cryptography"}


@pytest.mark.parametrize("package", ["launcher", "train", "bench", "tests"])
def test_every_module_has_a_docstring(package: str) -> None:
    for path in sources(package):
        text = path.read_text(encoding="utf-8")
        if path.name != "__init__.py" or text.strip():
            assert ast.get_docstring(ast.parse(text)), f"{path.relative_to(ROOT)} has no docstring"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def is_import(node: ast.AST) -> bool:
    called = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
    return isinstance(node, (ast.Import, ast.ImportFrom)) or called == "import_module"


def test_imports_inside_functions_are_few() -> None:
    """At a command's border, for an optional library, or for torch in a container; three tables load what is called.

    Methods of a run, most of which a process does not call, import what only they use.
    """
    tables = {"launcher/__init__.py", "launcher/cli/main.py:load", "launcher/features/__init__.py"}
    tables.add("launcher/api/run.py")
    found = {
        f"{path.relative_to(ROOT)}:{function.name}:{node.lineno}"
        for path in sources("launcher")
        for function in functions(ast.parse(path.read_text(encoding="utf-8")))
        for node in ast.walk(function)
        if is_import(node) and not f"{path.relative_to(ROOT)}:{function.name}".startswith(tuple(tables))
    }
    assert len(found) <= 23, "\n".join(sorted(found))


def test_classes_have_few_attributes() -> None:
    for path in sources("launcher"):
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(each, ast.ClassDef):
                stores = (n for n in ast.walk(each) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
                own_names = {n.attr for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"}
                assert len(own_names) <= 15, f"{path.relative_to(ROOT)}:{each.name} has {len(own_names)} attributes"


def test_a_refused_job_file_is_reported_without_connecting(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\nnodse: [gpu-a]\n")
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "up", str(bad)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"{bad}:2" in done.stderr
    assert "gpu-a:" not in done.stderr
