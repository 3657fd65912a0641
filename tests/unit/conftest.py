"""Fixtures of several modules."""

from tests.unit.container_box import box, one

__all__ = ["box", "one"]
