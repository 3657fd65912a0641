"""Random exploration of the protocol of min_nodes (meeting.py): crashes, partitions, pauses, lost messages.

The tests call the same functions that run in the containers. A generation in the model trains a counter and saves it,
like the trainer. All random values are derived from the schedule's number, so that failing schedules are reproducible.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from launcher.elastic.container_scripts import ends, meeting
from launcher.elastic.container_scripts.ends import End
from launcher.elastic.container_scripts.meeting import DONE, ENDED, PROPOSING, RUNNING, Heard, Rules, State

FEW, QUICK, ALL = 60, 300, 100_000
FAULTS, CALM = 80, 400  # seconds with faults, then maximum seconds until a generation has formed and finished
GOAL = 60  # steps of the job
SHAPES = [("abc", "", 2), ("abcd", "", 3), ("abc", "d", 3), ("abcde", "", 3), ("abc", "de", 3)]  # nodes, spares, least


@dataclass
class Node:
    """A node: the content of its disk, and its process if it is running."""

    name: str
    skew: float
    kept: dict[str, Any] = field(default_factory=dict)
    state: State | None = None
    view: dict[str, Heard] = field(default_factory=dict)
    back: float = 0.0  # when the engine restarts it
    paused: bool = False
    gone: bool = False  # permanently
    checkpoint: tuple[int, int] = (0, 0)  # generation, step
    finished: bool = False


@dataclass
class World:
    """A generation that at least one node has started."""

    members: tuple[str, ...]
    by: str
    ends: tuple[End, ...]  # of the generations before it
    step: int | None = None  # None: not all members have started


class Model:
    """One schedule. Raises AssertionError if two nodes disagree on a generation or an outdated one makes progress."""

    def __init__(self, number: int, *, minority: bool = False, forgetful: bool = False) -> None:
        """minority: half of the nodes are enough; forgetful: no promises are stored. Both break the protocol."""
        self.random = random.Random(number)
        nodes, spares, least = self.random.choice(SHAPES)
        self.rules = Rules(tuple(nodes + spares), len(nodes), least - minority, 6.0)
        self.forgetful = forgetful
        self.nodes = {name: Node(name, self.random.uniform(-100, 100)) for name in self.rules.order}
        self.worlds: dict[int, World] = {}
        self.cut: set[tuple[str, str]] = set()
        self.messages: list[tuple[float, str, State]] = []
        self.now, self.used, self.calm = 0.0, 0, False

    def run(self) -> None:
        while self.now < FAULTS:
            self.fault()
            self.second()
        self.calm = True
        self.cut.clear()
        for node in self.nodes.values():
            node.paused = False
        while self.now < FAULTS + CALM and not self.over():
            self.second()
        assert self.over(), [(node.gone, node.finished, node.state) for node in self.nodes.values()]
        assert any(world.step == GOAL for world in self.worlds.values()), [node.state for node in self.nodes.values()]

    def over(self) -> bool:
        """Return whether every remaining node has finished the job."""
        return all(node.finished or node.gone for node in self.nodes.values())

    def fault(self) -> None:
        draw, names = self.random.random(), list(self.nodes)
        node = self.nodes[self.random.choice(names)]
        if draw < 0.06:
            self.crash(node)
        elif draw < 0.08:
            node.paused = not node.paused
        elif draw < 0.12:
            side = set(self.random.sample(names, self.random.randint(1, len(names) - 1)))
            self.cut |= {(a, b) for a in names for b in names if (a in side) != (b in side)}
        elif draw < 0.14:
            self.cut.add((node.name, self.random.choice(names)))  # in one direction only
        elif draw < 0.2:
            self.cut.clear()
        elif draw < 0.23 and node.state is not None and not node.paused:
            self.fail(node, self.random.choice(["", f"error {self.now}"]))
        elif draw < 0.235 and sum(n.gone or n.finished for n in self.nodes.values()) < len(names) - self.rules.least:
            self.crash(node)
            node.gone = True

    def fail(self, node: Node, error: str) -> None:
        """Let the program of a node fail, if it is running; "": because another node is lost."""
        if node.state is not None and node.state.phase == RUNNING:
            world = self.worlds[node.state.generation]
            ended = meeting.program_failed(node.state, node.view, self.now + node.skew, "it failed", error)
            self.end(node, meeting.reached(ended, world.step or 0))

    def crash(self, node: Node) -> None:
        if node.state is not None and not node.finished:
            pauses = [0, 1, 2] if self.calm else [0, 1, 2, 10]
            node.state, node.view, node.back = None, {}, self.now + self.random.choice(pauses)

    def second(self) -> None:
        self.now += 1
        self.deliver()
        for node in self.random.sample(list(self.nodes.values()), len(self.nodes)):
            if not (node.gone or node.finished or node.paused):
                self.turn(node)
        for number, world in self.worlds.items():
            self.train(number, world)

    def deliver(self) -> None:
        due = [message for message in self.messages if message[0] <= self.now]
        self.messages = [message for message in self.messages if message[0] > self.now]
        self.random.shuffle(due)
        for _, to, received in due:
            node = self.nodes[to]
            if node.state is None or node.paused or node.finished or node.gone or (received.node, to) in self.cut:
                continue
            known = node.view.get(received.node)
            if known is None or meeting.newer(known.state, received):
                node.view[received.node] = Heard(received, self.now + node.skew)

    def turn(self, node: Node) -> None:
        if node.state is None:
            if self.now < node.back:
                return
            node.state = meeting.begin(node.name, node.kept, self.now + node.skew)
        before = node.state
        state = meeting.decide(self.rules, before, node.view, self.now + node.skew)
        node.state = state = replace(state, beat=before.beat + 1)
        node.kept = {"life": state.life} if self.forgetful else meeting.keep(state)
        if state.phase == RUNNING and before.phase != RUNNING:
            self.begun(state, before)
        if state.phase == PROPOSING:
            needless = set(ends.sitting_out(state.ends)) & set(state.members) and len(state.members) > self.rules.least
            assert not needless, "a member should sit out"
        world = self.worlds.get(state.generation)
        if state.phase == RUNNING and world and world.step == GOAL:
            node.state = state = replace(state, phase=DONE)
        self.send(state)
        if state.phase == DONE and meeting.may_leave(self.rules, node.view, self.now + node.skew):
            node.finished = True
        elif state.phase == ENDED:
            self.end(node, state)

    def send(self, state: State) -> None:
        for name in self.nodes:
            if name != state.node and (self.calm or self.random.random() > 0.05):
                late = self.random.choice([0, 0, 0, 1]) if self.calm else self.random.choice([0, 0, 0, 1, 3, 15])
                self.messages.append((self.now + late, name, state))

    def end(self, node: Node, state: State) -> None:
        """Send the final state once, and restart unless the node has ended permanently."""
        state = replace(state, beat=state.beat + 1)
        self.send(state)
        node.kept = {"life": state.life} if self.forgetful else meeting.keep(state)
        node.finished, node.state = state.last, state
        self.crash(node)

    def begun(self, state: State, before: State) -> None:
        """Check the start of a generation: increasing numbers, a quorum, and equal members on all nodes."""
        assert state.generation > before.joined
        assert self.rules.least <= len(state.members) <= self.rules.size
        assert state.node in state.members
        assert list(state.members) == sorted(state.members, key=self.rules.order.index)
        world = self.worlds.setdefault(state.generation, World(state.members, state.by, state.ends))
        assert (world.members, world.by, world.ends) == (state.members, state.by, state.ends)

    def train(self, number: int, world: World) -> None:
        """Take a step if all members run this generation; the first step loads the newest checkpoint."""
        members = [self.nodes[name] for name in world.members]
        for node in members:
            state = node.state
            if state is None or (state.phase, state.generation) != (RUNNING, number) or node.paused or node.gone:
                return
            if any((node.name, other.name) in self.cut for other in members):
                return
        assert number >= self.used, f"generation {number} trains after {self.used}"
        if world.step is None:
            generation, world.step = max(node.checkpoint for node in members)
            assert generation == self.used, f"generation {number} resumes from {generation}, not from {self.used}"
            for node in members:
                node.checkpoint = (number, world.step)
            self.used = number
        if world.step < GOAL:
            world.step += 1
            for node in members:  # each writes at a different time
                if self.random.random() < 0.3:
                    node.checkpoint = (number, world.step)


@pytest.mark.parametrize("numbers", [range(FEW), pytest.param(range(FEW, QUICK), marks=pytest.mark.ci)], ids=str)
def test_generations_never_overlap(numbers: range) -> None:
    formed = [explore(number) for number in numbers]
    assert sum(formed) > 1.5 * len(numbers)  # generations do end because of faults, and new ones form


@pytest.mark.parametrize("number", [15758])  # a promise was kept over a restart, but not the history that came with it
def test_a_schedule_that_failed_once(number: int) -> None:
    explore(number)


@pytest.mark.parametrize("fault", ["minority", "forgetful"])
def test_the_model_detects_violations_of_the_rules(fault: str) -> None:
    with pytest.raises(AssertionError, match="schedule"):
        [explore(number, **{fault: True}) for number in range(QUICK)]


class Bad(Model):
    """A schedule in which only one node fails, crashes or is suspended whenever it takes part."""

    def __init__(self, number: int, how: str) -> None:
        super().__init__(number)
        self.how, self.bad = how, self.nodes[self.random.choice(self.rules.order)]
        self.began = self.now

    def fault(self) -> None:
        node, victims = self.bad, [node for node in self.nodes.values() if node is not self.bad]
        if node.paused:
            node.paused = self.now < self.began
        elif node.state is None or node.state.phase != RUNNING or self.now - node.state.since + node.skew < 4:
            return
        elif self.how == "suspended":
            node.paused, self.began = True, self.now + self.random.choice([7, 8, 9, 30])
        else:
            if self.how == "fails":
                self.fail(node, "OSError: no space left on device")
            else:
                self.crash(node)
            for victim in victims:
                if self.random.random() < 0.5:
                    self.fail(victim, "")


@pytest.mark.parametrize("how", ["fails", "crashes", "suspended"])
def test_a_node_that_ended_two_generations_sits_out(how: str) -> None:
    for number in range(QUICK // 10):
        model = Bad(number, how)
        model.calm = True  # no message is lost
        while model.now < FAULTS + CALM and not model.over():
            model.fault()
            model.second()
        begun = {generation: world.members for generation, world in model.worlds.items()}
        assert model.over(), number
        assert max(world.step or 0 for world in model.worlds.values()) == GOAL, number
        costs = [generation for generation, members in begun.items() if model.bad.name in members]
        assert len(costs) <= ends.COSTS, (number, model.bad.name, begun)
        assert len(begun) <= ends.COSTS + 1, (number, model.bad.name, begun)


@pytest.mark.parametrize(("failing", "last"), [("abcd", True), ("a", False)])
def test_a_program_that_fails_on_several_nodes_is_started_three_times(failing: str, last: bool) -> None:
    for number in range(QUICK // 10):
        model = Model(number)
        model.calm = True
        while model.now < FAULTS + CALM and not model.over():
            for node in model.nodes.values():
                first = node.state and node.state.phase == RUNNING and node.state.members[0] == node.name
                if first and node.name in failing:
                    model.fail(node, "KeyError: 'dog'")
            model.second()
        assert model.over(), number
        assert len(model.worlds) == 3
        assert (max(world.step or 0 for world in model.worlds.values()) == GOAL) is not last
        if last:
            assert all(node.state and node.state.over for node in model.nodes.values()), number


def test_a_node_without_a_quorum_gives_up_and_reports_reachable_nodes() -> None:
    rules = meeting.Rules(("a", "b", "c"), size=3, least=2, lost_after=15)
    me = meeting.begin("c", {"life": 1, "generation": 1, "by": "a", "joined": 1}, 0.0)
    assert meeting.decide(rules, me, {}, 299.0).phase == meeting.IDLE
    ended = meeting.decide(rules, me, {}, 301.0)
    assert (ended.phase, ended.last) == (meeting.ENDED, True)
    assert ended.reason == "only c of at least 2 nodes can be reached from this node"


def test_jobs_have_a_majority() -> None:
    assert all(2 * least > len(nodes + spares) for nodes, spares, least in SHAPES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_more_schedules() -> None:
    for number in range(QUICK, ALL):
        explore(number)


def explore(number: int, *, minority: bool = False, forgetful: bool = False) -> int:
    """Run a schedule; return how many generations have trained."""
    model = Model(number, minority=minority, forgetful=forgetful)
    try:
        model.run()
    except AssertionError as error:
        raise AssertionError(f"schedule {number}: {error}") from error
    return sum(world.step is not None for world in model.worlds.values())
