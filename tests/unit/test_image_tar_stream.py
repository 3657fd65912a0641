"""Archives for `docker load` as streams, without the layers that the receiver has."""

import hashlib
import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.image import tar_stream


def tar(members, form=tarfile.PAX_FORMAT, **fields):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as out:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in fields.items():
                setattr(info, key, value)
            out.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def cut(data, sizes):
    """The same bytes in pieces of these sizes, cycled."""
    place, turn = 0, 0
    while place < len(data):
        size = sizes[turn % len(sizes)]
        yield data[place : place + size]
        place, turn = place + size, turn + 1


def passed_on(data, leave_out=frozenset(), pieces=(1 << 16,)):
    """The output when all members except some are copied."""
    out = [
        member.head + b"".join(member.body)
        for member in tar_stream.members(cut(data, pieces))
        if member.name not in leave_out
    ]
    return b"".join(out) + tar_stream.end()


def contents(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as found:
        return {member.name: found.extractfile(member).read() for member in found if member.isreg()}


@settings(max_examples=60, deadline=None)
@given(
    members=st.dictionaries(
        st.text("abcXYZ/é.-", min_size=1, max_size=180).filter(
            lambda n: n.strip("/.") and "//" not in n and n[0] not in "/."
        ),
        st.binary(max_size=3000),
        max_size=6,
    ),
    pieces=st.lists(st.integers(1, 1500), min_size=1, max_size=4),
    form=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_every_member_is_unchanged_however_the_stream_is_split(members, pieces, form):
    assert contents(passed_on(tar(members, form), pieces=pieces)) == contents(tar(members, form))


def test_long_names_and_fractional_times_as_written_by_go():
    name = "blobs/sha256/" + "a" * 150
    data = tar({name: b"content"}, mtime=1.5)
    [member] = tar_stream.members([data])
    assert (member.name, member.size) == (name, 7)


def test_an_unread_member_is_skipped():
    data = tar({"a": b"x" * 5000, "b": b"y"})
    assert [member.name for member in tar_stream.members([data])] == ["a", "b"]


def test_consecutive_archives_are_separated():
    both = tar({"a": b"1", "b": b"2"}) + tar({"a": b"3"})
    assert [(member.archive, member.name) for member in tar_stream.members(cut(both, [700]))] == [
        (0, "a"),
        (0, "b"),
        (1, "a"),
    ]


@pytest.mark.parametrize("kept", [700, 513, 100])
def test_a_truncated_stream_is_an_error(kept):
    with pytest.raises(tar_stream.TruncatedError):
        passed_on(tar({"a": b"x" * 1000})[:kept])


def test_v1_names_equal_those_of_a_real_engine():
    """The folder names that `docker save` of Docker 20.10 writes for an image with these layers."""
    layers = [
        "sha256:4bad82a2e49eb07aa30b8e4b8c1e21ca24133a6df85dd106f9e4ff274f09c9a6",
        "sha256:0a97282e0b59eb8e430e2b62242080207387986bccccaa8d1dad883136616fed",
        "sha256:7fbe087a0c9e007d163427ecaa010f7c001bb1e1e197e1e42ae680093196699d",
        "sha256:fe8d641772996c656ed0a0bec0708def88cc4d98c893506c91389a78901975ed",
    ]
    assert tar_stream.v1_ids(layers) == [
        "14371db4341e8ae0afddfbccae71c7a39eb9ffbffc02d67b737cc7bcc1e51e44",
        "3cc7daac1c2de298bf870ab95b9c01c9f1ee279b051d48042ebb8cfcfcfe3bdd",
        "4d8b7067ed3f77ba19010d74b75c88284a1e5facafec4f27f260ada67aa944a5",
        "e8b192952e03120fb54b5754fa740118f2a01ce703370e1d41a1e72680c0c826",
    ]


def diff(number):
    return "sha256:" + hashlib.sha256(str(number).encode()).hexdigest()


def test_known_layers_are_left_out_and_the_rest_is_copied():
    layers = [diff(i) for i in range(4)]
    data = tar({f"blobs/sha256/{layer[7:]}": layer.encode() for layer in layers} | {"manifest.json": b"[]"})
    left = contents(passed_on(data, tar_stream.layer_names(layers, 2)))
    assert set(left) == {f"blobs/sha256/{layer[7:]}" for layer in layers[2:]} | {"manifest.json"}


def test_a_repeated_known_layer_is_kept():
    """Engines write it only once; if it were left out, the repetition would find nothing."""
    layers = [diff(1), diff(2), diff(1)]
    names = tar_stream.layer_names(layers, 2)
    assert f"blobs/sha256/{diff(1)[7:]}" not in names
    assert f"blobs/sha256/{diff(2)[7:]}" in names


def test_nothing_is_left_out_for_an_empty_store():
    assert tar_stream.layer_names([diff(1), diff(2)], 0) == frozenset()


def test_common_layers_count_from_the_base_up():
    layers = [diff(1), diff(2), diff(3)]
    assert tar_stream.common(layers, []) == 0
    assert tar_stream.common(layers, [[diff(2), diff(3)], [diff(1), diff(9)], [diff(1), diff(2)]]) == 2
    assert tar_stream.common(layers, [[*layers, diff(4)]]) == 3
