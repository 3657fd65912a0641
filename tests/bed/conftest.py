"""Fixtures of tests that use the bed's nodes without the command line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launcher.node.ssh.connection import SshPool
from tests.bed.bed import Bed


@pytest.fixture
def pool(bed: Bed) -> Iterator[SshPool]:
    made = SshPool(str(bed.ssh_config))
    yield made
    made.close()
