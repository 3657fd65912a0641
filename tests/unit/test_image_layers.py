"""Which layers two images share."""

import hashlib

from launcher.image.push import common


def diff(number):
    return "sha256:" + hashlib.sha256(str(number).encode()).hexdigest()


def test_common_layers_count_from_the_base_up():
    layers = [diff(1), diff(2), diff(3)]
    assert common(layers, []) == 0
    assert common(layers, [[diff(2), diff(3)], [diff(1), diff(9)], [diff(1), diff(2)]]) == 2
    assert common(layers, [[*layers, diff(4)]]) == 3
