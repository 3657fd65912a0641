"""The working directory on a node: files with any names arrive unchanged under the same path."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from launcher.node import output_folder
from launcher.node.files import Files
from launcher.node.machine import LocalMachine
from launcher.records.snapshot import snapshot
from tests.e2e.programs.lists import tree
from tests.process.machine import Machine

AWKWARD = ["x" * 255, "ü" * 127, "-", "-rf", "\n", "a\nb\n", " ", "\udcff\udcfe", "\udcc3", "\\", "11 path=x", "{}"]
TEXT = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=63)
BYTES = st.binary(min_size=1, max_size=255).map(lambda name: name.translate(bytes.maketrans(b"/\0", b"_0")))
NAME = st.one_of(st.sampled_from(AWKWARD), TEXT, BYTES.map(os.fsdecode)).filter(
    lambda name: not name.startswith(".") and not name.rstrip().endswith(".pyc")
)
PATH = st.lists(NAME, min_size=1, max_size=4).map("/".join)
TARGET = st.one_of(PATH, NAME.map(lambda name: "../" * 60 + name), st.sampled_from(["/etc", "./a//b/", ".."]))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.dictionaries(PATH, st.binary(max_size=50), max_size=6), links=st.dictionaries(PATH, TARGET, max_size=3))
def test_every_file_arrives_under_its_path(machine: Machine, files: dict[str, bytes], links: dict[str, str]) -> None:
    source = machine.home / "source"
    workdir = machine.home / "workdir"
    source.mkdir()
    workdir.mkdir()
    try:
        for name in {**files, **links}:
            path = source / name
            with suppress(FileExistsError, NotADirectoryError, IsADirectoryError):  # below a file, or where a folder is
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(files[name]) if name in files else path.symlink_to(links[name])
        packed = snapshot(source)
        assume(not packed.left_out.why)  # a private key's first line, or a cache's name: hypothesis reads our sources
        output_folder.unpack(Files(LocalMachine("here", "me")), str(workdir), packed.archive)
        assert tree(workdir) == tree(source)
    finally:
        shutil.rmtree(source)
        shutil.rmtree(workdir)
