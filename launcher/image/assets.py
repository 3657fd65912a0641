"""The files of images/, from a checkout or from the installed wheel."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def text(name: str) -> str:
    """The text of `images/NAME`."""
    return files("images").joinpath(name).read_text(encoding="utf-8")
