"""Which layers two images share, and what an archive calls those that the other side has."""

import hashlib

from launcher.image.export import common, layer_names, v1_ids


def test_v1_names_are_those_of_a_real_engine():
    """Folder names of `docker save` by Docker 20.10 for an image with these layers."""
    layers = [
        "sha256:4bad82a2e49eb07aa30b8e4b8c1e21ca24133a6df85dd106f9e4ff274f09c9a6",
        "sha256:0a97282e0b59eb8e430e2b62242080207387986bccccaa8d1dad883136616fed",
        "sha256:7fbe087a0c9e007d163427ecaa010f7c001bb1e1e197e1e42ae680093196699d",
        "sha256:fe8d641772996c656ed0a0bec0708def88cc4d98c893506c91389a78901975ed",
    ]
    assert v1_ids(layers) == [
        "14371db4341e8ae0afddfbccae71c7a39eb9ffbffc02d67b737cc7bcc1e51e44",
        "3cc7daac1c2de298bf870ab95b9c01c9f1ee279b051d48042ebb8cfcfcfe3bdd",
        "4d8b7067ed3f77ba19010d74b75c88284a1e5facafec4f27f260ada67aa944a5",
        "e8b192952e03120fb54b5754fa740118f2a01ce703370e1d41a1e72680c0c826",
    ]


def diff(number):
    return "sha256:" + hashlib.sha256(str(number).encode()).hexdigest()


def test_known_layers_are_left_out_under_the_names_of_newer_and_older_engines():
    layers = [diff(i) for i in range(4)]
    names = layer_names(layers, 2)
    assert {name for name in names if name.startswith("blobs/")} == {
        f"blobs/sha256/{layer[7:]}" for layer in layers[:2]
    }
    assert {name for name in names if name.endswith("layer.tar")} == {f"{v1}/layer.tar" for v1 in v1_ids(layers[:2])}


def test_a_known_layer_that_comes_again_is_kept():
    """Engines write it once; the second place would find nothing."""
    layers = [diff(1), diff(2), diff(1)]
    names = layer_names(layers, 2)
    assert f"blobs/sha256/{diff(1)[7:]}" not in names
    assert f"blobs/sha256/{diff(2)[7:]}" in names


def test_nothing_is_left_out_for_a_store_that_has_nothing():
    assert layer_names([diff(1), diff(2)], 0) == frozenset()


def test_common_layers_count_from_the_base_up():
    layers = [diff(1), diff(2), diff(3)]
    assert common(layers, []) == 0
    assert common(layers, [[diff(2), diff(3)], [diff(1), diff(9)], [diff(1), diff(2)]]) == 2
    assert common(layers, [[*layers, diff(4)]]) == 3
