"""Builds the wheel, whose only package is `launcher`; pyproject.toml has everything else.

A package `train` or `images` in site-packages would be imported in place of a user's folder of that name without an
__init__.py, so the wheel has them, the example and the page for assistants below launcher/bundled, where
launcher/shipped.py finds them.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FILES = ("jobs/quickstart.yaml", "jobs/data/digits.tar", "jobs/data/LICENCE.md", "docs/agents.md")


class Bundle(build_py):
    """Moves what is not the launcher's package below it. A checkout is used as it is."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        built = Path(self.build_lib)
        bundled = built / "launcher" / "bundled"
        shutil.rmtree(bundled, ignore_errors=True)  # of a build before
        bundled.mkdir()
        for name in ("train", "images"):
            shutil.move(built / name, bundled / name)
        for name in FILES:
            (bundled / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, bundled / name)


setup(cmdclass={"build_py": Bundle})
