"""Commands as text for a node's login shell. tests/e2e/test_login.py tests zsh, fish and tcsh."""

from __future__ import annotations

import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.node.ssh.config import quote

ARGUMENTS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))


@given(st.lists(ARGUMENTS, max_size=4))
@settings(max_examples=50, deadline=None)
def test_a_posix_shell_reads_every_argument_unchanged(arguments: list[str]) -> None:
    done = subprocess.run(["sh", "-c", quote(["printf", "%s|", *arguments, "."])], capture_output=True, check=True)
    assert done.stdout.decode() == "".join(f"{argument}|" for argument in [*arguments, "."])


@pytest.mark.parametrize("argument", ["a\nb", "it's", "hey!", "a\\b", "\\"])
def test_characters_that_shells_read_differently_are_not_left_within_quotes(argument: str) -> None:
    assert not re.search(r"[\n!]|\\[^0]", quote(["echo", argument]))
    assert quote(["echo", argument]).count("'") == 4


def test_plain_commands_stay_readable() -> None:
    assert quote(["docker", "load", "a b"]) == "docker load 'a b'"
