"""`launcher doctor`: whether a job's image exists anywhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from launcher.errors import ImageUnfit
from launcher.image.distribution import provide
from launcher.image.image_locations import ImageLocations
from launcher.job.parts import Image
from launcher.node.engine import Engine
from launcher.planning.checks import Level
from launcher.run.doctor import _found

INFO = SimpleNamespace(id="sha256:a", content="", arch="amd64")


class Node:
    def __init__(self, node: str, images: object) -> None:
        self.node = self.host = node
        self.images = images


def engine(node: str, *names: str, registry: str | None = None) -> Engine:
    """An engine with these images, whose registry answers, or refuses with this message."""

    def digest(name: str, login: object) -> str:
        if registry is not None:
            raise ImageUnfit(node, registry)
        return "sha256:b"

    store = SimpleNamespace(inspect=lambda name: INFO if name in names else None, arch=lambda: "amd64", digest=digest)
    return cast(Engine, Node(node, store))


@pytest.mark.parametrize(
    ("nodes", "level", "what"),
    [
        ([engine("a", "team/x:1"), engine("b", registry="no")], Level.OK, "team/x:1 is on a"),
        ([engine("a"), engine("b")], Level.OK, "team/x:1 is on no node yet, and a can pull it"),
        (
            [engine("a", "team/y:1", registry="could not ask: not found"), engine("b", registry="no")],
            Level.FAIL,
            "image team/x:1 was not found on a, b, and a cannot pull it: could not ask: not found",
        ),
    ],
)
def test_an_image_is_found_on_a_node_or_in_a_registry(nodes: list[Engine], level: Level, what: str) -> None:
    for image in (Image(ref="team/x:1"), Image(base="team/x:1")):
        check = _found(image, ImageLocations(nodes, None, print), None)
        assert (check.level, check.what) == (level, what)
        assert bool(check.fix) == (level is Level.FAIL)


def test_an_image_that_is_here_for_another_architecture_is_no_trouble_of_the_registry() -> None:
    nodes = [engine("a", registry="denied: requested access to the resource is denied"), engine("b")]
    store = SimpleNamespace(inspect=lambda _: SimpleNamespace(id="sha256:c", content="", arch="arm64"))
    here = cast(Engine, Node("local", store))
    for name in ("team/x:1", "mine"):
        with pytest.raises(ImageUnfit, match="this machine has it for arm64, but the nodes need amd64") as refused:
            provide(name, ImageLocations(nodes, here, print))
        assert "--platform" in refused.value.next_step
