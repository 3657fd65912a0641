"""The launcher as a user runs it."""

from tests.e2e.fixtures import bed_cli, caches, cli, home_cli, scene

__all__ = ["bed_cli", "caches", "cli", "home_cli", "scene"]
