"""Where a job's image may be: on the nodes' engines and on the caller's own; who has it, and whether it is the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.image import parallel
from launcher.image.stores import store
from launcher.node.engine import Engine, ImageInfo

Say = Callable[[str], None]


@dataclass(frozen=True)
class ImageOnNodes:
    """The image that all nodes have.

    id: on the first node; ids: on each, by node, which differ where stores are of different kinds.
    shipped: bytes sent, by node; nodes that had it already are not in there. why: it is this one.
    """

    reference: str
    id: str
    ids: Mapping[str, str] = field(default_factory=dict)
    built: bool = False
    shipped: Mapping[str, int] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class Places:
    """The nodes' engines in the job's order, and the caller's own Docker where he has one (it may be a node too)."""

    nodes: Sequence[Engine]
    local: Engine | None = None

    @property
    def names(self) -> str:
        return ", ".join(engine.node for engine in self.nodes)

    def called(self, engine: Engine) -> str:
        return "this machine" if engine is self.local else engine.node

    def holders(self, found: Found) -> list[tuple[Engine, ImageInfo]]:
        """Engines that have what was looked for, the caller's first, then the nodes in their order."""
        local = [] if self.local is None or found.local is None else [(self.local, found.local)]
        return local + [(e, i) for e, i in zip(self.nodes, found.nodes, strict=True) if i is not None]


@dataclass(frozen=True)
class Found:
    """What an `inspect` of one name showed: by node, and on the caller's own engine."""

    nodes: tuple[ImageInfo | None, ...]
    local: ImageInfo | None


def look(name: str, places: Places) -> Found:
    """One `inspect` everywhere at once: a single round trip."""
    apart = places.local is not None and places.local not in places.nodes
    asked = [*places.nodes, *([places.local] if places.local is not None and apart else [])]
    infos = parallel.each(lambda engine: store(engine).inspect(name), asked)
    at_home = infos[asked.index(places.local)] if places.local is not None else None
    return Found(tuple(infos[: len(places.nodes)]), at_home)
