"""Where a fault happens: some nodes of the bed, and a launcher that has a run on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.bed.bed import Bed, Node
from tests.e2e.cli import Cli
from tests.e2e.drill import Drill

AWAY = "no connection, trying again"  # what the launcher says of a node that does not answer


@dataclass(frozen=True)
class Scene:
    """The first `count` nodes of a bed, with a launcher to use them."""

    cli: Cli
    bed: Bed
    nodes: tuple[Node, ...]

    @property
    def count(self) -> int:
        return len(self.nodes)

    def begin(self, name: str, **keys: Any) -> Drill:
        drill = Drill.begin(self.cli, name, nodes=[node.alias for node in self.nodes], **keys)
        drill.sees("^step 23$")
        return drill

    def clean(self) -> int:
        """How much is left over once the run was taken down: it must be nothing.

        A node that was cut off hears of the end of our old connections when TCP tries again, after a minute or two.
        """
        self.cli("down")
        left = self.bed.wait_clean(self.nodes, timeout=200)
        assert left == []
        return len(left)


def rows(names: dict[str, Any], four: set[str], everyday: set[str]) -> Any:
    """Every fault with 2 nodes and those of `four` with 4, too; the slow ones marked."""
    return pytest.mark.parametrize(
        ("name", "scene"),
        [
            pytest.param(
                name,
                count,
                id=f"{name.replace(' ', '-')}-{count}",
                marks=[] if name in everyday and count == 2 else [pytest.mark.slow],
            )
            for name in names
            for count in ((2, 4) if name in four else (2,))
        ],
        indirect=["scene"],
    )
