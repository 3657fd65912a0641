"""A plan that aims at the cells of the table (table.py) that were hit least; the rest of it is as random as any other.

Each aim is a scene of two to four steps. Whether it hits is decided by time: the next plans aim there again, if not.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.histories import history as h
from tests.histories import play
from tests.histories.play import GROUP, Place, Step
from tests.histories.table import BEFORE, DURING, OF_NODE, Cell, can_be, cells, kind

SHARE = 0.6  # of the scenes


def plan(seed: str, counted: Counter[Cell], place: Place, steps: int = 16) -> list[Step]:
    """The same for the same seed and counts."""
    dice, counted, every = random.Random(seed), counted.copy(), cells_of(place)
    made: list[Step] = []
    while len(made) < steps:
        if dice.random() >= SHARE:
            made += play.scene(dice, made, place)
            continue
        least = min(counted[cell] for cell in every)
        cell = dice.choice([cell for cell in every if counted[cell] == least])
        counted[cell] += 1  # another one is next, also if this one misses
        made += aimed(dice, made, place, cell)
    return made


def cells_of(place: Place) -> list[Cell]:
    """Those that can be hit there."""
    faults = (*h.HITS, *(OF_NODE + each for each in place.faults + place.machine))
    return [cell for cell in cells(faults) if can_be(*cell)]


def aimed(dice: random.Random, made: Sequence[Step], place: Place, cell: Cell) -> list[Step]:
    command, fault, moment = cell
    how = fault.removeprefix(OF_NODE)
    folder = "two" if how == "full" else dice.choice(play.FOLDERS)
    first = _up(dice, made, place, lambda step: step.folder == folder and "-d" in step.argv and not step.again)
    about, before = _lasting(first), [_lasting(first)]
    if command == "up, a sweep" and moment == BEFORE and how in place.faults and how != "full":
        about = replace(_lasting(_up(dice, made, place, _is(command, folder))), hit="kill", moment="began", waits=False)
        before = [about]
        call = replace(about, argv=("up", f"{about.job}.yaml", "--resume", GROUP), program=None, hit="", moment="")
    elif command.startswith("up"):
        resumes = "--resume" in command or (moment == BEFORE and how in place.faults and how != "full")
        before, is_one = before if resumes else [], _is(command, folder)
        call = _up(dice, [*made, *before], place, lambda step: is_one(step) and (about.job in step.argv) == resumes)
        about = call if moment == DURING else about
    else:
        call = _command(dice, about, place, command)
    call = replace(call, hit="", moment="", waits=False)
    if fault in h.HITS:
        when = {h.AT_ONCE: "at once", h.SILENT: f"{dice.uniform(0.03, 0.4):.2f}", h.SPOKE: "word"}[moment]
        return [*before, replace(call, hit=fault, moment=when)]
    strike = replace(play.strike(dice, about, place, how), moment="")
    if how == "full":  # by turns it is filled and freed
        before += [strike] if sum(step.fault == "full" for step in made) % 2 else []
    elif moment == BEFORE:
        strike = replace(strike, moment="began", lasting=5.0 if strike.lasting else 0.0)
    if moment == BEFORE:
        return [*before, strike, call]
    if not call.program or how == "full" or how in place.machine:
        return [*before, call, replace(strike, moment=f"{dice.uniform(0.02, 0.4):.2f}")]
    if command == "up -d":  # which ends as its program begins
        call = replace(call, hit="suspend", moment="started")
    return [*before, call, replace(strike, moment="began")]


def _lasting(up: Step) -> Step:
    """It has begun when the next step comes, and does not end by itself."""
    assert up.program
    return replace(up, hit="", moment="", waits=True, program=replace(up.program, hangs=True, codes={}))


def _is(command: str, folder: str) -> Callable[[Step], bool]:
    return lambda step: kind_of(step) == command and step.folder == folder


def kind_of(step: Step) -> str:
    return kind(h.Asked(0.0, 0, step.folder, step.argv, step.job, len(step.nodes), step.sweep, step.again))


def _up(dice: random.Random, made: Sequence[Step], place: Place, fits: Callable[[Step], bool]) -> Step:
    """One of the random ones that fits."""
    ups = [step for step in made if step.program]
    while not fits(step := play.up(dice, ups, place)[0]):
        pass
    return step


def _command(dice: random.Random, about: Step, place: Place, command: str) -> Step:
    """Of the folder of a job, and about that or all."""
    while True:
        step = play.command(dice, [about], place)[0]
        if _is(command, about.folder)(step) and (about.job in step.argv or command in ("runs", "down --all", "clean")):
            return step
