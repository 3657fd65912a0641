"""The first of many names, in a message."""

from __future__ import annotations

import pytest

from launcher.naming import first_of


@pytest.mark.parametrize(
    ("names", "said"),
    [("", ""), ("a", "a"), ("abc", "a, b, c"), ("abcd", "a, b, c and 1 more"), ("abcdefgh", "a, b, c and 5 more")],
)
def test_the_rest_is_counted(names: str, said: str) -> None:
    assert first_of([*names], 3) == said
