"""Turn a node's growing attempts file into messages: restarts, generations with rank 0 on the node, stops."""

from __future__ import annotations

from collections.abc import Callable

from launcher.run import attempts, messages
from launcher.run.messages import Message, RankZeroMoved


class Restarts:
    """The attempts file as read so far; each event is reported once."""

    def __init__(
        self, node: str, put: Callable[[Message], None], moved: Callable[[RankZeroMoved], None], *, elastic: bool
    ) -> None:
        """moved: called with RankZeroMoved messages; put: with all others. elastic: the job has min_nodes."""
        self._node = node
        self._elastic = elastic
        self._put = put
        self._moved = moved
        self._text = b""
        self._starts = 1  # the first start is not a restart
        self._worlds = 0
        self._stopped = self._gave_up = False

    @property
    def generation(self) -> int:
        """The generation in which the node takes part, in a job with min_nodes; 0: none."""
        return attempts.current_generation(self._text)

    @property
    def begun(self) -> bool:
        return bool(self._text)

    def skip(self, text: bytes) -> None:
        """Do not report the restarts in this text, with which the file starts."""
        self._starts = max(1, len(attempts.parse(text)))

    def add(self, data: bytes) -> None:
        """Add what was appended to the file, in whole lines, and report new events."""
        self._text = (self._text + data)[: attempts.LIMIT]
        starts, worlds = attempts.parse(self._text), attempts.parse_worlds(self._text)
        if not self._elastic:  # an elastic job reports the new generation instead
            for index in range(self._starts, len(starts)):
                self._put(messages.NodeRestarted(self._node, index, starts[index - 1].why()))
        self._starts = max(self._starts, len(starts))
        for world in worlds[self._worlds :]:
            if world.members[0] == self._node:
                self._moved(RankZeroMoved(self._node, world))
        self._worlds = len(worlds)
        if not self._gave_up and (why := attempts.give_up_reason(self._text)):
            self._gave_up = True
            self._put(messages.NodeOver(self._node, why))
        if not self._stopped and (by := attempts.stopped_by(self._text)):
            self._stopped = True
            self._put(messages.NodeStopped(self._node, by))
