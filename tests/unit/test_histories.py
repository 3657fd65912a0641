"""The checker of random histories: of each sentence of docs/promise.md, one that keeps it and one that breaks it."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.histories import aim, play, table
from tests.histories.checker import SECRET, SENTENCES, check
from tests.histories.history import (
    Asked,
    Began,
    Crashed,
    Ended,
    Exited,
    Fault,
    Found,
    History,
    Hit,
    Kept,
    Record,
    Seen,
    Told,
    dump,
    load,
)
from tests.histories.table import OF_NODE

RUN, OTHER = "j00-20260101-100000-aaaa", "j01-20260101-100000-bbbb"
NODES = ("local-0", "local-1")
RUNS_ON = f"launcher: {RUN} runs on local-0, local-1"
UP = Asked(1, 0, "one", ("up", "j00.yaml"), "j00", 2)
DETACHED = replace(UP, argv=("up", "j00.yaml", "-d"))


def programs(codes: Sequence[int] = (0, 0), run: str = RUN, at: float = 2, port: int = 1) -> list[Record]:
    """Two nodes, which begin at `at` and end at `at` + 1."""
    first = 10 if run == RUN else 20
    began = [Began(at, run, node, first + rank, port) for rank, node in enumerate(NODES)]
    return [*began, *(Ended(at + 1, run, node, first + rank, codes[rank], 3) for rank, node in enumerate(NODES))]


def look(at: float, *runs: str, outputs: Sequence[str] = ()) -> Seen:
    running = [(run, node, (10 if run == RUN else 20) + rank) for run in runs for rank, node in enumerate(NODES)]
    return Seen(at, tuple(running), tuple((run, "local-0") for run in runs), tuple(outputs))


def collected(state: str = "done", lines: int = 3, **values: object) -> Found:
    text = "".join(f"local-0 {number} xx\n" for number in range(lines))
    return replace(Found(9, "one", RUN, state, logs=dict.fromkeys(NODES, text)), **values)  # type: ignore[arg-type]


def broken(*records: Record) -> set[int]:
    history = History(tuple(sorted(records, key=lambda each: each.at)))
    return {each.sentence for each in check(history)}


def ended(code: int, at: float = 4, call: int = 0, out: str = "", err: str = RUNS_ON) -> Exited:
    return Exited(at, call, code, out, err)


def status(state: str, run: str = RUN, at: float = 5) -> list[Record]:
    said = json.dumps({"run": run, "state": state}, indent=2)
    return [Asked(at, 5, "one", ("status", "--json")), Exited(at + 0.1, 5, 0, said, "")]


WHOLE = [UP, *programs(), ended(0), collected(), look(8)]
DETACHED_RUN = [DETACHED, *programs(), ended(0, 2)]
DOWN = [Asked(5, 1, "one", ("down", "j00")), Exited(6, 1, 0, "", "")]
DELETE = [Asked(5, 1, "one", ("down", "--purge", "--unfetched")), Exited(6, 1, 0, "", "")]
RUNS = Asked(5, 1, "one", ("runs",))
TRACEBACK = 'File "/x/launcher/cli/main.py", line 1\nKeyError: 1'
EXEC = Asked(2.1, 1, "one", ("exec", "j00", "--", "x"))
FAILS_FIRST = [Began(2, RUN, "local-0", 10, 1), Began(2, RUN, "local-1", 11, 1), Ended(3, RUN, "local-1", 11, 3, 3)]
PEER_TOLD = [*FAILS_FIRST, Told(4, RUN, "local-0", 10), Ended(5, RUN, "local-0", 10, 143, 3)]
TOLD = [Told(2.5, RUN, node, 10 + rank) for rank, node in enumerate(NODES)]
LATER = Fault(8.5, "kill", RUN, "local-1")
KEPT = Kept(2, RUN, "local-0", 10, "made", "text")
SWEEP = replace(UP, sweep=True, nodes=1, argv=("up", "j00.yaml"))
VARIANT: list[Record] = [Began(2, RUN, "local", 10, 1, "a"), Ended(3, RUN, "local", 10, 0, 3)]
AGAIN = [Began(5, RUN[:-4] + "cccc", "local", 12, 1, "a"), Ended(6, RUN[:-4] + "cccc", "local", 12, 0, 3)]
REFUSED = replace(UP, at=4.5, call=3, job="j01", argv=("up", "j01.yaml"))
OTHERS = [replace(UP, at=4.1, call=3, job="j01"), *programs(run=OTHER, at=4.2), ended(0, 5.5, 3, err=" runs on ")]
CUT, HEALED = Fault(5.2, "cut", "", "local-1"), Fault(5.8, "healed", "", "local-1")
SECOND_TIME = [replace(each, pid=each.pid + 20) for each in programs(at=5) if isinstance(each, (Began, Ended))]
ENGINES = [replace(CUT, at=2.5, how="engine", node=node) for node in NODES]
AGAIN_OUT = "local-0 0 x\nlocal-0 1 x\nlocal-0 0 x\n"
NOTHING = "stopped; nothing was started"
SECOND = replace(UP, at=1, call=3, job="j01")
KEEP = {
    "done": WHOLE,
    "status while it runs": [*WHOLE, *status("running", at=2.5), look(2.1, RUN)],
    "down": [DETACHED, *programs(), ended(0, 2), *DOWN, look(5.5, RUN), look(8), collected()],
    "a peer is stopped for one who is attached": [UP, *PEER_TOLD, ended(1, 6), collected("failed", failed="local-1")],
    "one after another on a port": [*WHOLE, SECOND, *programs(run=OTHER, at=5), ended(0, 6.5, 3)],
    "on the port of a run whose master has ended": [
        UP,
        *(
            replace(each, at=5.5) if each.at == 3 and each.pid == 11 else each
            for each in programs()
            if hasattr(each, "pid")
        ),
        ended(0, 6),
        collected(),
        replace(SECOND, at=3.1),
        *programs(run=OTHER, at=4),
        ended(0, 5.5, 3),
    ],
    "a file in the output folder": [*WHOLE, KEPT, Found(9, "", RUN, files={"made": "text"})],
    "a file that was fetched": [*WHOLE, KEPT, collected(files={"made": "text"})],
    "a file that was given up": [
        *WHOLE,
        KEPT,
        Asked(5, 1, "one", ("down", "--purge", "--unfetched")),
        Exited(6, 1, 0, "", ""),
    ],
    "refused": [*WHOLE, REFUSED, ended(3, 5, 3, err="in use"), *status("done", at=6)],
    "in use": [*WHOLE, look(4.2, RUN), REFUSED, ended(3, 5, 3, err=f"in use by run {RUN} of me")],
    "exec": [UP, *programs(), EXEC, Exited(2.9, 1, 7, "", ""), ended(0)],
    "detached": [UP, Hit(2.5, 0, "interrupt", "spoke"), *programs(), ended(0)],
    "killed": [UP, Hit(2.5, 0, "kill", "spoke"), *programs(), ended(-9)],
    "a machine is away while down is asked": [*WHOLE, CUT, HEALED, DOWN[0], Exited(6, 1, 6, "", "")],
    "with min_nodes, one node is enough": [replace(UP, again="min_nodes"), *programs((0, 3)), ended(0), collected()],
    "a program begins again": [
        replace(UP, again="restarts"),
        *programs((0, 3)),
        *SECOND_TIME,
        ended(0, 7, out=AGAIN_OUT),
        collected(logs={"local-0": AGAIN_OUT}),
    ],
    "an engine that starts again ends what it finds": [
        DETACHED,
        ended(0, 2),
        *programs()[:2],
        *ENGINES,
        replace(HEALED, at=2.6),
        look(3),
    ],
    "down of what is on a node": [
        DETACHED,
        ended(0, 2),
        *TOLD,
        *programs((143, 143)),
        Asked(2.4, 1, "two", ("down", "--nodes", "local")),
        Exited(6, 1, 0, "", ""),
    ],
    "down in a folder that only knows the run of another": [
        DETACHED,
        ended(0, 2),
        *TOLD,
        *programs((143, 143)),
        Asked(2.4, 1, "two", ("down",)),
        Exited(6, 1, 0, "", f"launcher: the latest run is {RUN}"),
    ],
    "another variant": [
        SWEEP,
        *VARIANT,
        *(replace(each, variant="b") if isinstance(each, Began) else each for each in AGAIN),
    ],
    "what copies its output is killed before the program is": [
        *WHOLE,
        Fault(2.1, "kill", RUN, "local-0"),
        Crashed(2.2, RUN, "local-0", 10, "BrokenPipeError(32, 'Broken pipe')"),
    ],
    "a variant that was stopped": [
        SWEEP,
        *VARIANT,
        Told(2.9, RUN, "local", 10),
        *AGAIN,
        Asked(2.5, 1, "one", ("down",)),
        Exited(3, 1, 0, "", ""),
    ],
}
BREAK = {
    "1: a node failed": (1, [UP, *programs((0, 1)), ended(1), collected(failed="")]),
    "1: a node never began": (1, [UP, programs()[0], programs()[2], ended(0), collected()]),
    "1: status says so before the end": (1, [*WHOLE, *status("done", at=2.5)]),
    "1: no node of min_nodes has ended with 0": (
        1,
        [replace(UP, again="min_nodes"), *programs((3, 3)), ended(1), collected()],
    ),
    "2: it runs after down": (2, [*WHOLE, *DOWN, look(7, RUN)]),
    "2: a container is left": (2, [*WHOLE, *DOWN, replace(look(7, RUN), running=())]),
    "2: it runs and is called failed": (
        2,
        [DETACHED, *programs(), ended(0, 2), *status("failed", at=2.5), look(2.8, RUN)],
    ),
    "3: two on a port": (3, [*WHOLE, SECOND, *programs(run=OTHER, at=2.5)]),
    "4: a line is lost": (4, [*WHOLE[:-2], collected(lines=2)]),
    "4: a line came twice": (4, [*WHOLE[:-2], collected(logs={"local-0": "local-0 0 x\nlocal-0 0 x\n"})]),
    "4: twice on the screen": (4, [*WHOLE[:-3], ended(0, out="local-0 0 x\nlocal-0 0 x\n"), collected()]),
    "4: a secret in a file": (4, [*WHOLE[:-2], collected(secret=("job.yaml",))]),
    "4: a secret on the screen": (4, [*WHOLE[:-3], ended(0, err=f"{RUNS_ON} {SECRET}"), collected()]),
    "5: a file is gone": (5, [*WHOLE, KEPT]),
    "5: a file is cut short": (5, [*WHOLE, KEPT, collected(files={"made": "te"})]),
    "5: the working directory is gone": (5, [*WHOLE, Crashed(2, RUN, "local-0", 10, "FileNotFoundError()")]),
    "6: a folder is left": (6, [*WHOLE, REFUSED, ended(3, 5, 3, err=""), look(6, outputs=[OTHER])]),
    "6: it is the latest run": (6, [*WHOLE, REFUSED, ended(3, 5, 3, err=""), *status("failed", OTHER, at=6)]),
    "6: after Ctrl-C it is the latest run": (
        6,
        [
            *WHOLE,
            REFUSED,
            Hit(4.8, 3, "interrupt", "spoke"),
            ended(5, 5, 3, err=NOTHING),
            *status("created", OTHER, at=6),
        ],
    ),
    "7: the peer is named": (7, [UP, *PEER_TOLD, ended(1, 6), collected("failed", failed="local-0")]),
    "7: the later one is named": (
        7,
        [UP, *programs((3, 0)), Fault(8.5, "kill", RUN, "local-1"), collected("failed", failed="local-1")],
    ),
    "7: a peer that was lost is named": (
        7,
        [
            UP,
            *programs()[:2],
            Ended(3, RUN, "local-1", 11, 3, 3),
            Ended(3.2, RUN, "local-0", 10, 1, 3, lost=True),
            ended(1, 5),
            collected("failed", failed="local-0"),
        ],
    ),
    "8: a traceback": (
        8,
        [*WHOLE, RUNS, Exited(6, 1, 1, "", TRACEBACK)],
    ),
    "8: an unexpected error": (
        8,
        [*WHOLE, RUNS, Exited(6, 1, 1, "", "unexpected KeyError: this is a bug in the launcher")],
    ),
    "8: it does not end": (8, [*WHOLE, RUNS]),
    "8: two down, one of which finds files gone": (8, [*WHOLE, DOWN[0], Exited(6, 1, 6, "", "")]),
    "8: not confirmed, though the machine was back": (
        8,
        [*WHOLE, replace(CUT, at=4.2), replace(HEALED, at=4.4), DOWN[0], Exited(6, 1, 6, "", "")],
    ),
    "8: refused for nothing": (8, [*WHOLE, REFUSED, ended(3, 5, 3, err="could not start")]),
    "8: in use by what was over": (8, [*WHOLE, look(4.2), REFUSED, ended(3, 5, 3, err=f"in use by run {RUN} of me")]),
    "8: running, though it was over": (8, [*WHOLE, look(4.5), *status("running")]),
    "8: a variant ran again": (8, [SWEEP, *VARIANT, *AGAIN]),
    "8: a variant ran twice": (8, [SWEEP, *VARIANT, *(replace(each, at=each.at - 2.5) for each in AGAIN)]),
    "9: ended with its launcher": (9, [UP, Hit(2.1, 0, "kill", "spoke"), ended(-9, 2.2), *programs((143, 143)), *TOLD]),
    "9: killed without a cause": (9, [DETACHED, ended(0, 2), *programs()[:2], look(2.5, RUN), look(3)]),
    "9: ended, though another machine's engine started again": (
        9,
        [DETACHED, ended(0, 2), *programs()[:2], replace(CUT, at=2.5, how="engine", node="other"), look(2.6)],
    ),
    "9: a peer is stopped for nobody": (9, [DETACHED, ended(0, 2), *PEER_TOLD]),
    "10: done is 1": (10, [*WHOLE[:-3], ended(1), collected()]),
    "10: done at last is 1": (
        10,
        [replace(UP, again="restarts"), *programs((0, 3)), *SECOND_TIME, ended(1, 7), collected()],
    ),
    "10: failed is 0": (10, [UP, *programs((0, 3)), ended(0), collected("failed")]),
    "10: a full disk changes the code": (10, [*WHOLE[:-3], Fault(2, "full", "one"), ended(1), collected()]),
    "10: a code that is not documented": (10, [*WHOLE, RUNS, Exited(6, 1, 70, "", "")]),
    "10: exec without room for a file": (
        10,
        [UP, *programs(), Fault(2.05, "full", "one"), EXEC, Exited(2.9, 1, 3, "", ""), ended(0)],
    ),
    "10: exec has a code of its own": (
        10,
        [UP, *programs(), EXEC, Exited(2.9, 1, 3, "", ""), ended(0)],
    ),
}


@pytest.mark.parametrize("name", KEEP)
def test_a_history_that_keeps_all_sentences(name: str) -> None:
    assert broken(*KEEP[name]) == set()


@pytest.mark.parametrize("name", BREAK)
def test_a_history_that_breaks_a_sentence_is_found(name: str) -> None:
    sentence, records = BREAK[name]
    assert sentence in broken(*records)


def test_every_sentence_of_the_page_has_a_function_and_a_history_that_breaks_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "promise.md").read_text(encoding="utf-8")
    numbers = [int(number) for number in re.findall(r"^(\d+)\. \*\*", page, re.MULTILINE)]
    assert numbers == [int((each.__doc__ or "").split(".")[0]) for each in SENTENCES]
    assert set(numbers) == {sentence for sentence, _ in BREAK.values()}


def test_a_history_is_the_same_after_it_was_written_and_read() -> None:
    assert list(load(dump(WHOLE).splitlines())) == WHOLE


def test_a_plan_is_that_of_its_seed_and_can_be_written_and_read() -> None:
    for place in (play.PLAIN, play.BED):
        plans = [play.plan(seed, place=place) for seed in ("1", "2")]
        assert plans == [play.plan("1", place=place), play.plan("2", place=place)]
        assert plans[0] != plans[1]
        assert play.load(play.dump(plans[0]).splitlines()) == plans[0]


@pytest.mark.parametrize("place", [play.PLAIN, play.BED], ids=["plain", "bed"])
def test_every_cell_of_the_table_that_can_be_is_aimed_at(place: play.Place) -> None:
    every = aim.cells_of(place)
    for cell in every:
        command, fault, _ = cell
        steps = aim.aimed(random.Random(str(cell)), [], place, cell)
        of_kind = [step for step in steps if step.argv and aim.kind_of(step) == command]
        how = fault.removeprefix(OF_NODE)
        assert of_kind, cell
        assert any(step.hit == fault for step in of_kind) or any(step.fault == how for step in steps), cell
    counted = Counter(dict.fromkeys(every, 3))
    least = ("fetch", "kill", "spoke")
    counted[least] = 0
    assert any(step.argv[:1] == ("fetch",) and step.hit == "kill" for step in aim.plan("1", counted, place))
    assert aim.plan("1", counted, place) == aim.plan("1", counted, place)


def test_the_table_has_what_was_hit_and_when() -> None:
    before, during = replace(LATER, at=4), replace(LATER, at=5.2)
    hit = [*DETACHED_RUN, before, RUNS, Hit(5.1, 1, "kill", "at once"), during, Exited(9, 1, -9, "", "")]
    resumed = replace(UP, at=9, call=2, argv=("up", "j01.yaml", "--resume", "j00"), job="j01")
    counted = table.count(History((*sorted(hit, key=lambda each: each.at), resumed, Exited(10, 2, 2, "", ""))))
    assert counted["runs", "kill", "at once"] == counted["runs", "node: kill", "during"] == 1
    assert counted["up --resume", "node: kill", "before"] == 2  # of the run that it resumes
    assert "| up | -/0 |" in table.rows(Counter({("logs", "node: kill", "before"): 1}))


def test_no_step_on_the_bed_names_this_machine() -> None:
    for step in (step for seed in range(50) for step in play.plan(str(seed), place=play.BED)):
        assert "local" not in step.argv
        assert {*step.nodes, *filter(None, [step.node])} <= {"node1", "node2"}
