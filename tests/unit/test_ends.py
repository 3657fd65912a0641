"""Which nodes ended a generation of a job with min_nodes, and the consequences: pure functions."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from launcher import container_scripts
from launcher.container_scripts.words import error, lost_connection
from launcher.elastic import container_scripts as of_elastic
from launcher.elastic.container_scripts.ends import End, away, history, repeated, settled, sitting_out

A, B, C = ("a",), ("b",), ("c",)


@pytest.mark.parametrize(
    ("accounts", "nodes", "why"),
    [
        ([End(1, C), End(1, C), End(1, A)], C, ""),  # c was cut off: it did not receive a's messages
        ([End(1, C), End(1, A)], (), ""),  # the connection between two nodes
        ([End(1, A), End(1, B), End(1, C)], (), ""),  # all lost power
        ([End(1, B), End(1, A, "exit code 1")], B, ""),  # a's program only lost its peer
        ([End(1, A, "KeyError"), End(1, B, "KeyError"), End(1)], ("a", "b"), "KeyError"),
        ([End(1, A, "exit code 3"), End(1, A, "exit code 3"), End(1, B, "exit code 1")], A, "exit code 3"),
        ([End(1), End(1)], (), ""),
    ],
)
def test_which_nodes_ended_a_generation(accounts: list[End], nodes: tuple[str, ...], why: str) -> None:
    found = settled(1, accounts, 0)
    assert (found.nodes, found.error) == (nodes, why)


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ((), ["b, c lost at 12:03 UTC"]),
        ((End(1, C),), ["b, c lost at 12:03 UTC"]),
        ((End(1, C, "exit code 3"),), ["the program failed on c at 12:03 UTC", "b lost at 12:03 UTC"]),
        ((End(1, ("b", "c"), "KeyError"),), ["the program failed on b, c at 12:03 UTC"]),
        ((End(1, C, "exit code 3"), End(2, A)), ["b, c lost at 12:03 UTC"]),
    ],
)
def test_a_node_on_which_the_program_failed_is_not_called_lost(ends: tuple[End, ...], why: list[str]) -> None:
    assert away(["b", "c"], ends, "12:03 UTC") == why


def test_only_members_of_the_newest_generation_count() -> None:
    stale = (End(1, A),)  # c's view when it was cut off
    agreed = (End(1, C), End(2, B))
    assert history([(1, stale), (2, agreed)]) == agreed
    assert history([(0, ()), (0, ())]) == ()


def test_a_node_is_excluded_longer_each_time() -> None:
    for costs, rests in ((1, 0), (2, 2), (3, 4)):
        for since in range(6):
            ends = tuple(End(n, A if n < costs else ()) for n in range(costs + since))
            assert ("a" in sitting_out(ends)) == (since < rests), (costs, since)
    assert [*sitting_out((End(1, A), End(2, ("a", "b")), End(3, ("a", "b"))))] == ["a", "b"]


def test_an_error_is_repeated_if_no_generation_made_progress() -> None:
    first, again, third = End(1, A, "KeyError"), End(2, A, "KeyError"), End(3, B, "KeyError")
    assert repeated((first, again, third)) == ("KeyError", {"a", "b"})
    assert repeated((first, again)) == ("", set())
    assert repeated((first, End(2, A, "IndexError"), third)) == ("", set())
    assert repeated((first, again, End(3, B, "KeyError", 12))) == ("", set())
    assert repeated((End(0, C, "", 12), *(End(n, A, "KeyError", 12) for n in (1, 2, 3)))) == ("KeyError", {"a"})
    assert repeated((End(1, A), End(2, A), End(3, A)))[0] == ""  # these nodes were lost


def test_an_error_is_reported_without_its_variable_parts() -> None:
    text = "step 1\n[rank0]: Traceback (most recent call last):\n[rank0]:   File 't.py'\n[rank0]: {}\nmore\n"
    assert error(text.format("KeyError: 'größe'")) == r"KeyError: 'gr\xf6\xdfe'"
    one, two = (error(text.format(f"OSError: [Errno 28] at 0x{n}f, {n}")) for n in (1234, 98765))
    assert one == two == "OSError: [Errno 28] at N, N"
    assert error("killed\n") == ""


RAISED = 'Traceback (most recent call last):\n  File "{}", line 3, in read\n    read()\n{}\n'


@pytest.mark.parametrize(
    ("file", "error", "lost"),
    [
        ("chain.py", "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", True),
        ("chain.py", "EOFError", True),
        ("chain.py", "EOFError: Ran out of input", False),  # a truncated pickle
        ("chain.py", "ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("/usr/lib/python3.11/urllib/request.py", "ConnectionResetError: [Errno 104] Connection reset by peer", False),
        ("/venv/site-packages/requests/models.py", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)", False),
    ],
)
def test_the_lost_connections_of_a_program_without_torch(file: str, error: str, lost: bool) -> None:
    assert lost_connection(RAISED.format(file, error)) is lost


TRACEBACKS = Path(__file__).with_name("tracebacks")


@pytest.mark.parametrize(
    ("ends", "own"),
    [
        (["victim-collective", "own-urllib-refused"], "urllib.error.URLError: <urlopen error [Errno N] Connection"),
        (["victim-collective", "victim-store-get"], ""),
        (["own-key-error-then-barrier"], "KeyError: 'key'"),
    ],
)
def test_a_ranks_own_error_ends_a_generation_because_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[str], own: str
) -> None:
    for folder in (container_scripts, of_elastic):  # as in the container, where they are one
        monkeypatch.syspath_prepend(str(Path(folder.__file__).parent))
    begun = importlib.import_module("begun")
    for rank, end in enumerate(ends):
        (tmp_path / f"rank-{rank}.log").write_bytes((TRACEBACKS / f"{end}.txt").read_bytes())
    found = begun.StartedGeneration(tmp_path, tmp_path / "n.log", 0).error(1, torchrun=True)
    assert found.startswith(own)
    assert bool(found) == bool(own)


@pytest.mark.parametrize(
    ("printed", "error"),
    [
        (RAISED.format("data.py", "ValueError: bad record 12345"), "ValueError: bad record N"),
        ("usage: main.py [-h]\nmain.py: error: no such option: --lr\n", "main.py: error: no such option: --lr"),
        ("step 7\n", "exit code 3"),
    ],
)
def test_the_error_of_a_command_is_what_it_says_since_its_generation_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, error: str
) -> None:
    for folder in (container_scripts, of_elastic):
        monkeypatch.syspath_prepend(str(Path(folder.__file__).parent))
    begun = importlib.import_module("begun")
    log, before = tmp_path / "n.log", RAISED.format("data.py", "KeyError: 'of the generation before'")
    log.write_text(before + printed)
    assert begun.StartedGeneration(tmp_path, log, len(before)).error(3, torchrun=False) == error
