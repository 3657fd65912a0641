"""The image stores of real engines: save, send, load, tag, list, remove."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator

import pytest

from launcher.errors import ImageBuildFailed, ImageShipFailed, ImageUnfit
from launcher.node.connect import Fleet, connect
from launcher.node.docker.images import DockerImages
from tests.bed import faults
from tests.bed.bed import Bed
from tests.bed.settings import TRAIN_IMAGE

pytestmark = pytest.mark.bed
MADE = "launcher-images-test:one"


@pytest.fixture
def fleet(bed: Bed) -> Iterator[Fleet]:
    with connect([("a", "node1"), ("b", "node2")], "docker", bed.ssh_config) as connected:
        yield connected
        for engine in connected.engines:
            assert engine.images is not None
            engine.images.remove(MADE)


def store(fleet: Fleet, rank: int) -> DockerImages:
    images = fleet.engines[rank].images
    assert images is not None
    return images


def build(images: DockerImages, dockerfile: str, say: Callable[[str], None] = lambda _: None) -> str:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo("Dockerfile")
        member.size = len(dockerfile)
        tar.addfile(member, io.BytesIO(dockerfile.encode()))
    return images.build(
        buffer.getvalue(), tag=MADE, arguments={"WORD": "hello"}, labels={"launcher.made": "1"}, network="host", say=say
    )


def test_an_image_is_built_and_sent_and_is_the_same_on_both_nodes(fleet: Fleet) -> None:
    one, two = store(fleet, 0), store(fleet, 1)
    log: list[str] = []
    made = build(one, f"FROM {TRAIN_IMAGE}\nARG WORD\nRUN echo the word is $WORD\n", log.append)
    assert any("the word is hello" in line for line in log)
    info = one.inspect(MADE)
    assert info is not None
    assert (info.id, info.tags, info.arch) == (made, (MADE,), "amd64")
    assert two.inspect(made) is None

    two.load(one.save(made))
    assert two.inspect(made) is not None
    two.tag(made, MADE)
    there = two.inspect(MADE)
    assert there is not None
    assert (there.id, there.layers, there.created) == (info.id, info.layers, info.created)
    assert [found.id for found in two.list({"launcher.made": "1"})] == [made]
    assert two.list({"launcher.made": "2"}) == []
    two.remove(MADE)
    two.remove(MADE)
    assert two.inspect(made) is None


def test_without_the_openssh_client_the_archive_goes_to_the_engines_api(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = store(fleet, 0), store(fleet, 1)
    made = build(one, f"FROM {TRAIN_IMAGE}\nENV B=c\n")
    pieces = list(one.save(made))
    monkeypatch.setenv("PATH", "/nonexistent")
    two.load(pieces)
    two.tag(made, MADE)
    assert two.inspect(made) is not None
    with pytest.raises(ImageShipFailed):
        two.load([b"this is no archive"])


def test_a_failed_build_step_is_reported_with_its_last_lines_and_leaves_nothing(bed: Bed, fleet: Fleet) -> None:
    with pytest.raises(ImageBuildFailed, match=r"(?s)a: could not build.*no luck today.*returned a non-zero code: 4"):
        build(store(fleet, 0), f"FROM {TRAIN_IMAGE}\nRUN echo no luck today; exit 4\n")
    assert bed.docker(bed.nodes[0], "ps", "-aq") == ""


def test_an_invalid_archive_is_refused_with_the_nodes_name(fleet: Fleet) -> None:
    with pytest.raises(ImageShipFailed, match=r"^b: "):
        store(fleet, 1).load([b"this is no archive"])


def test_a_truncated_source_is_not_loaded_as_an_image(bed: Bed, fleet: Fleet) -> None:
    def broken() -> Iterator[bytes]:
        yield from list(store(fleet, 0).save(TRAIN_IMAGE))[:3]
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        store(fleet, 1).load(broken())


def test_a_full_disk_is_reported(bed: Bed, fleet: Fleet) -> None:
    said = "b: the container engine's disk is full"
    with faults.small_data_root(bed, bed.nodes[1]), pytest.raises(ImageShipFailed, match=said):
        store(fleet, 1).load(store(fleet, 0).save(TRAIN_IMAGE))


def test_an_abandoned_save_releases_its_connection(fleet: Fleet) -> None:
    images = store(fleet, 0)
    for _ in range(7):  # more than the pool has connections
        pieces = images.save(TRAIN_IMAGE)
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
    assert images.inspect(TRAIN_IMAGE) is not None


def test_an_image_in_no_registry_is_unfit(fleet: Fleet) -> None:
    with pytest.raises(ImageUnfit, match="a: "):
        store(fleet, 0).pull("127.0.0.1:1/no/such:image")
    with pytest.raises(ImageUnfit, match="a: "):
        store(fleet, 0).digest("127.0.0.1:1/no/such:image")
    with pytest.raises(ImageShipFailed, match="a: "):
        next(iter(store(fleet, 0).save("no/such:image")))
