"""The environment of the programs that are held against each other."""

from __future__ import annotations

import os


def installed() -> dict[str, str]:
    """This one, with byte code kept: what a rival has from its installation, we have from the first run."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
