"""Because of whom a generation of a job with min_nodes ended, and what follows: pure functions."""

from __future__ import annotations

import pytest

from launcher.container_scripts.ends import End, history, repeated, settled, sitting_out
from launcher.container_scripts.words import LOST_PEER, error

A, B, C = ("a",), ("b",), ("c",)


@pytest.mark.parametrize(
    ("accounts", "nodes", "why"),
    [
        ([End(1, C), End(1, C), End(1, A)], C, ""),  # c was cut off: it has not heard a
        ([End(1, C), End(1, A)], (), ""),  # the way between two nodes
        ([End(1, A), End(1, B), End(1, C)], (), ""),  # the power of all went off
        ([End(1, B), End(1, A, "exit code 1")], B, ""),  # a's program has only lost its peer
        ([End(1, A, "KeyError"), End(1, B, "KeyError"), End(1)], ("a", "b"), "KeyError"),
        ([End(1, A, "exit code 3"), End(1, A, "exit code 3"), End(1, B, "exit code 1")], A, "exit code 3"),
        ([End(1), End(1)], (), ""),
    ],
)
def test_because_of_whom_a_generation_ended(accounts: list[End], nodes: tuple[str, ...], why: str) -> None:
    found = settled(1, accounts, 0)
    assert (found.nodes, found.error) == (nodes, why)


def test_only_who_took_part_in_the_newest_generation_is_asked() -> None:
    stale = (End(1, A),)  # as c saw it when it was cut off
    agreed = (End(1, C), End(2, B))
    assert history([(1, stale), (2, agreed)]) == agreed
    assert history([(0, ()), (0, ())]) == ()


def test_a_node_sits_out_longer_each_time() -> None:
    for costs, rests in ((1, 0), (2, 2), (3, 4)):
        for since in range(6):
            ends = tuple(End(n, A if n < costs else ()) for n in range(costs + since))
            assert ("a" in sitting_out(ends)) == (since < rests), (costs, since)
    assert [*sitting_out((End(1, A), End(2, ("a", "b")), End(3, ("a", "b"))))] == ["a", "b"]


def test_an_error_is_repeated_if_no_generation_got_further() -> None:
    first, again, third = End(1, A, "KeyError"), End(2, A, "KeyError"), End(3, B, "KeyError")
    assert repeated((first, again, third)) == ("KeyError", {"a", "b"})
    assert repeated((first, again)) == ("", set())
    assert repeated((first, End(2, A, "IndexError"), third)) == ("", set())
    assert repeated((first, again, End(3, B, "KeyError", 12))) == ("", set())
    assert repeated((End(0, C, "", 12), *(End(n, A, "KeyError", 12) for n in (1, 2, 3)))) == ("KeyError", {"a"})
    assert repeated((End(1, A), End(2, A), End(3, A)))[0] == ""  # they were lost


def test_an_error_is_named_without_what_varies() -> None:
    text = "step 1\n[rank0]: Traceback (most recent call last):\n[rank0]:   File 't.py'\n[rank0]: {}\nmore\n"
    assert error(text.format("KeyError: 'größe'")) == r"KeyError: 'gr\xf6\xdfe'"
    one, two = (error(text.format(f"OSError: [Errno 28] at 0x{n}f, {n}")) for n in (1234, 98765))
    assert one == two == "OSError: [Errno 28] at N, N"
    assert error("killed\n") == ""


def test_a_connection_that_ends_is_known() -> None:
    assert LOST_PEER.search("json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)")
    assert LOST_PEER.search("  File 'x'\nEOFError\n")
    assert not LOST_PEER.search("EOFError: Ran out of input")  # a pickle that was cut off
