"""What the launcher comes with besides its package: the trainer, the files for images, the examples, and a page.

They are beside the package in a checkout, and below it in the wheel (setup.py).
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent


def shipped(name: str) -> Path:
    """Return the path of `train`, `images`, an example or a page, as a checkout names it. It may be missing."""
    bundled = _PACKAGE / "bundled"
    return bundled / name if bundled.is_dir() else _PACKAGE.parent / name
