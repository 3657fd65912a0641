"""Fixtures that every test may ask for."""

from tests.bed.fixtures import bed, clean_bed

__all__ = ["bed", "clean_bed"]
