"""Which port `launcher doctor` tries between two nodes."""

from __future__ import annotations

import pytest

from launcher.run.doctor import high_port


@pytest.mark.parametrize(
    ("text", "listening", "port"),
    [
        ("32768\t60999\n", (), 60999),
        ("32768\t60999\n", (22, 60999, 60998), 60997),
        ("50000 50009", (), 50009),
        ("50000 50000", (50000,), 50000),
        ("", (), 60999),
        ("0 70000", (), 60999),
        ("welcome 1 2 3", (), 60999),
    ],
)
def test_a_port_of_the_nodes_own_range_on_which_nothing_listens(
    text: str, listening: tuple[int, ...], port: int
) -> None:
    assert high_port(text, listening) == port
