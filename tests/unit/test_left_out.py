"""A module or file that a program missed, and that was left out of the code, is named with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.records.code_files import code_files
from launcher.records.left_out import LeftOut
from launcher.run.end.left_out import left_out_hint, not_searched_hint

IGNORED = "pkg/data/\nconf.yaml\n*.so\n/scripts/\nckpt\ndatasets/\nlogs/*\n# generated\nversion.py\ngen/*\n"
HERE = "/home/ada/.launcher/j-1/workdir/node-0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = (
        *("pkg/__init__.py", "pkg/data/loader.py", "conf.yaml", "pkg/_C.cpython-310-x86_64-linux-gnu.so", ".env"),
        *("scripts/run.sh", "ckpt/last.pt", "datasets/cat/1.jpg", "logs/a", "src/lib/version.py"),
        *("src/lib/__init__.py", "gen/message.py", "runs/old/model.pt", "pkg/version.py"),
    )
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / ".gitignore").write_text(IGNORED)
    return tmp_path


@pytest.mark.parametrize(
    ("said", "entry", "why"),
    [
        ("ModuleNotFoundError: No module named 'pkg.data'", "pkg/data/", ".gitignore:1"),
        ("/usr/bin/python3: No module named pkg.data.loader", "pkg/data/", ".gitignore:1"),
        ("ImportError: cannot import name 'data' from 'pkg' (/workspace/code/pkg/__init__.py)", "pkg/data/", ":1"),
        ("ImportError: cannot import name '_C' from partially initialized module 'pkg' (most", "pkg/_C.cpython", ":3"),
        ("ModuleNotFoundError: No module named 'lib.version'", "src/lib/version.py", ".gitignore:9"),
        ("ModuleNotFoundError: No module named 'gen'", "gen/message.py", ".gitignore:10"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'conf.yaml'", "conf.yaml", ".gitignore:2"),
        (f'FileNotFoundError: [Errno 2] No such file or directory: "{HERE}/conf.yaml"', "conf.yaml", ".gitignore:2"),
        ("python3: can't open file '/workspace/code/./scripts/x.py': [Errno 2] No such file", "scripts/", ":4"),
        ("sh: 1: ./scripts/run.sh: not found", "scripts/", ".gitignore:4"),
        ("env: \u2018./scripts/run.sh\u2019: No such file or directory", "scripts/", ".gitignore:4"),
        ("bash: line 1: scripts/run.sh: No such file or directory", "scripts/", ".gitignore:4"),
        ("RuntimeError: Parent directory ckpt does not exist.", "ckpt/", ".gitignore:5"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'datasets'", "datasets/", ".gitignore:6"),
        ("Primary config directory not found: check that '/workspace/code/scripts' exists", "scripts/", ".gitignore:4"),
        ("KeyError: \"['datasets'] not found in axis\"", "", ""),
        ("ValueError: no datasets were not found", "", ""),
        ("FileNotFoundError: Couldn't find any class folder in datasets/cat.", "datasets/", ".gitignore:6"),
        ("OSError: Unable to synchronously open file (unable to open file: name = 'ckpt/a.h5', err", "ckpt/", ":5"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'logs/today.txt'", "logs/", "nothing in it is sent"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '.env'", ".env", "it may contain credentials"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'runs/old/model.pt'", "runs/", "it is never sent"),
        ("ModuleNotFoundError: No module named 'datasets'", "", ""),  # a package; the folder here has images
        ("ModuleNotFoundError: No module named 'pkg'", "", ""),  # it is sent, but for one file
        ("ModuleNotFoundError: No module named 'yaml'", "", ""),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/ckpt/x'", "", ""),
        ("FileNotFoundError: [Errno 2] No such file or directory: '../ckpt/x'", "", ""),
        ("RuntimeError: conf.yaml: learning rate must be positive", "", ""),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'other.yaml'", "", ""),
    ],
)
def test_the_reason_is_found_for_what_is_missing_only(folder: Path, said: str, entry: str, why: str) -> None:
    out = LeftOut()
    list(code_files(folder, out))
    words = f'Traceback (most recent call last):\n  File "{HERE}/main.py", line 1\n    import x\n{said}\n'
    hint = left_out_hint(words, LeftOut(json.loads(json.dumps(out.why))), folder, HERE, ["", "src"])
    if not entry:
        assert hint == ""
        return
    assert hint.startswith(entry)
    name, _, reason = hint.partition(" exists here but was not sent: ")
    assert name.startswith(entry)
    assert reason.partition(";")[0].endswith(why)


@pytest.mark.parametrize(
    ("sent", "roots", "paths", "hint"),
    [
        (
            ["scripts/train.py", "models/__init__.py"],
            ["scripts"],
            "",
            "models is in the code's folder, {}PYTHONPATH: .}",
        ),
        (["scripts/train.py", "models.py"], ["scripts"], "", "models is in the code's folder, {}PYTHONPATH: .}"),
        (["train.py", "src/models/net.py"], [""], "", "models is in src/, {}PYTHONPATH: src}"),
        (["s/train.py", "models.py", "old/models.py"], ["s", "lib"], "lib", "models is in {}PYTHONPATH: .:lib}"),
        (["scripts/train.py", "models/net.txt", "data/models/a/b.py"], ["scripts"], "", ""),
        (["train.py", "models/net.py"], [""], "", ""),  # Python searches there: something else hides it
        (["scripts/train.py", "mymodels.py", "mymodels/a.py"], ["scripts"], "", ""),
        (
            ["train.py", "loggers/__init__.py", "loggers/models.py"],
            [""],
            "",
            "",
        ),  # loggers.models, as wandb in loggers/
        (["train.py", "lib/models.py"], [""], "", "install the package models; if the one in lib/{}PYTHONPATH: lib}"),
    ],
)
def test_a_module_that_was_sent_is_found_with_pythonpath(
    sent: list[str], roots: list[str], paths: str, hint: str
) -> None:
    found = not_searched_hint("models", sent, roots, paths)
    start, _, end = hint.partition("{}")
    assert found.startswith(start)
    assert found.endswith(end)
    assert bool(found) == bool(hint)
