"""The setting of a fault test: some nodes of the bed, and a launcher with a run on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.bed.bed import Bed, Node
from tests.e2e.cli import Cli
from tests.e2e.drill import Drill

AWAY = r"no connection since \w+ \d\d:\d\d, reconnecting"  # the launcher's message about a node that does not respond


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
        """Takes the run down; returns the number of leftovers, which must be 0.

        A node that was cut off learns that the old connections are closed at TCP's next retransmission, after up to two
        minutes.
        """
        self.cli("down")
        left = self.bed.wait_clean(self.nodes, timeout=200)
        assert left == [], left  # this module is not rewritten by pytest
        return len(left)


def rows(names: dict[str, Any], four: set[str], everyday: set[str]) -> Any:
    """Every fault with 2 nodes, those in `four` also with 4; all but `everyday` with 2 nodes are marked slow."""
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
