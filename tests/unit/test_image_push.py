"""Compression for slow links only."""

import gzip
import random

from launcher.image import push


def test_a_compressed_stream_is_gzip_of_the_same_bytes():
    pieces = [random.Random(n).randbytes(1000) + bytes(50_000) for n in range(20)]
    squeezed = b"".join(push.compressed(pieces))
    assert gzip.decompress(squeezed) == b"".join(pieces)
    assert len(squeezed) < 50_000


def test_a_link_counts_as_slow_if_it_was_measured_slow(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not push.is_slow("gpu-a")
    push.remember_link("gpu-a", 100_000_000, 10)  # 10 MB/s
    assert push.is_slow("gpu-a")
    push.remember_link("gpu-a", 1000, 10)  # too little to measure
    assert push.is_slow("gpu-a")
    push.remember_link("gpu-a", 100_000_000, 1)
    assert not push.is_slow("gpu-a")
    assert not push.is_slow("gpu-b")
