"""The time to mask a report grows with its length, and not with the square of it, whatever programs write."""

from __future__ import annotations

import re

from launcher.features.report.masking import Anonymous, Names
from tests.unit.test_hostile_lines import is_slow, texts


def test_masking_does_not_take_the_square_of_a_hostile_text() -> None:
    names = Names(("a-secret-value",), ("ada",), ("/home/ada",), (("gpu-a", "10.0.0.1"),), ("gpu-b.org",))
    anonymous = Anonymous(names)
    found = texts(anonymous._shapes.pattern, re.VERBOSE | re.DOTALL)  # noqa: SLF001
    assert [unit for unit in found if is_slow(anonymous.text, unit)] == []
