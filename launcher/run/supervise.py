"""A run supervised until it ends: messages to the screen, peers of a failed node stopped, the outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial

from launcher.errors import LauncherError
from launcher.model.container import ContainerState
from launcher.node.parallel import in_background, run_all_settled
from launcher.records.store import NodeOfRun, Record
from launcher.run import messages
from launcher.run.diagnose import Failure
from launcher.run.evidence import gather
from launcher.run.finish import Outcome, conclude, missing_node, uncollected
from launcher.run.follow import Follow
from launcher.run.followed import Followed
from launcher.run.hang_report import unmet
from launcher.run.locate import Attached, Owner
from launcher.run.messages import Message
from launcher.run.state import HANG_CODE

# A rank that fails takes its peers down within a second or two: torchrun and the communication library see to that.
# Those that still run after PEER_TIMEOUT are stopped, SIGKILL after GRACE: 15 s in all.
PEER_TIMEOUT = 3.0
GRACE = 10.0
STACKS = 1.0  # seconds for ranks that hang to write down where they stand


def supervise(
    attached: Attached, shown: Sequence[Followed], show: Callable[[Message], None], *, resumed: bool
) -> Outcome:
    """Follow a run until every container has ended. Interrupting this leaves the run alone."""
    states: dict[str, ContainerState] = {}
    missing: dict[str, Failure] = {}
    stopped_by: list[str] = []
    all_ended = threading.Event()
    stopping: Callable[[], None] | None = None
    following = Follow(attached, shown, resumed=resumed)
    try:
        for message in following.messages():
            _record(attached.record, message)
            if isinstance(message, messages.NodeEnded):
                states[message.node] = message.state
            elif isinstance(message, (messages.NodeGone, messages.NodeRemoved)):
                missing[message.node] = missing_node(message)
            elif isinstance(message, messages.NodeStopped):
                stopped_by.append(message.by)
            elif isinstance(message, messages.NodeBack):
                stopping = None  # if the run has failed meanwhile, it could not be stopped there
            badly = len(attached.unreachable) + len(missing) + sum(state.exit_code != 0 for state in states.values())
            failed = badly > attached.may_lose
            if failed or stopped_by or attached.is_done(states):
                following.over()
            if failed and stopping is None and attached.owner is not Owner.OTHER:
                stopping = in_background(partial(_stop_peers, attached, following, states, stopped_by, all_ended))
            if len(states) + len(missing) >= len(attached.nodes):
                all_ended.set()
            show(message)
        if stopping is not None:
            stopping()
    finally:
        following.close()
    not_collected = {name: uncollected(name, error) for name, error in following.not_collected.items()}
    outcome = conclude(attached, states, not_collected | missing, next(iter(stopped_by), None))
    if problem := attached.record.finish(outcome.to_dict()):
        show(messages.NotCollected(problem))
    attached.record.event("ended", state=outcome.state.value, failure=outcome.failure)
    return outcome


def _record(record: Record, message: Message) -> None:
    if isinstance(message, messages.NodeEnded):
        state = message.state
        record.event("node ended", node=message.node, exit_code=state.exit_code, oom_killed=state.oom_killed)
    elif not isinstance(message, (messages.Output, messages.Progress, messages.Tick)):
        record.event(type(message).__name__.replace("Node", "node ").lower(), **asdict(message))


def _stop_peers(
    attached: Attached,
    following: Follow,
    states: Mapping[str, ContainerState],
    stopped_by: Sequence[str],
    all_ended: threading.Event,
) -> None:
    """Peers that have not ended by themselves. A stop ends a restart policy: only once restarts are used up.

    A user who stops the run gives all of its nodes the time for a checkpoint.
    """

    def stop(node: NodeOfRun) -> None:
        engine = attached.engines[node.name]
        try:
            if hung or collective:  # a rank here may be the one that all others waited for
                engine.signal(node.container, "QUIT" if hung else "URG")
                all_ended.wait(STACKS)
            engine.stop(node.container, GRACE)
            attached.record.event("peer stopped", node=node.name)
        except LauncherError as error:
            attached.record.event("peer not stopped", node=node.name, reason=str(error))

    if all_ended.wait(PEER_TIMEOUT) or stopped_by:
        return
    root, left = attached.record.paths.root, [node for node in attached.nodes if node.name not in states]
    ended = [gather(root, node, states[node.name]) for node in attached.nodes if node not in left]
    hung = any(one.state.exit_code == HANG_CODE for one in ended)
    collective = unmet(ended) or not following.up_to_date
    run_all_settled([partial(stop, node) for node in left])
