"""Commands as text for a node's login shell. tests/e2e/test_login.py gives the same to zsh, fish and tcsh."""

from __future__ import annotations

import re
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.node.ssh.config import quote

WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))


@given(st.lists(WORDS, max_size=4))
@settings(max_examples=50, deadline=None)
def test_a_posix_shell_reads_every_word_as_it_is(words: list[str]) -> None:
    done = subprocess.run(["sh", "-c", quote(["printf", "%s|", *words, "."])], capture_output=True, check=True)
    assert done.stdout.decode() == "".join(f"{word}|" for word in [*words, "."])


@pytest.mark.parametrize("word", ["a\nb", "it's", "hey!", "a\\b", "\\"])
def test_nothing_that_shells_read_differently_is_left_within_quotes(word: str) -> None:
    assert not re.search(r"[\n!]|\\[^0]", quote(["echo", word]))
    assert quote(["echo", word]).count("'") == 4


def test_plain_commands_stay_readable() -> None:
    assert quote(["docker", "load", "a b"]) == "docker load 'a b'"
