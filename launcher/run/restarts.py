"""One node's file of attempts while it grows, as messages: restarts, generations with rank 0 there, who stops it."""

from __future__ import annotations

from collections.abc import Callable

from launcher.run import attempts, messages
from launcher.run.messages import Message, RankZeroMoved


class Restarts:
    """What the file has said so far; each thing is reported once."""

    def __init__(
        self, node: str, put: Callable[[Message], None], moved: Callable[[RankZeroMoved], None], *, elastic: bool
    ) -> None:
        """moved: takes the messages of generations, put: all others. elastic: the job has min_nodes."""
        self._node = node
        self._elastic = elastic
        self._put = put
        self._moved = moved
        self._text = b""
        self._starts = 1  # the first one is no restart
        self._worlds = 0
        self._stopped = self._over = False

    @property
    def generation(self) -> int:
        """In which the node takes part, in a job with min_nodes; 0: in none."""
        return attempts.joined(self._text)

    @property
    def begun(self) -> bool:
        return bool(self._text)

    def skip(self, text: bytes) -> None:
        """Restarts in this text, of which the file begins, are not reported."""
        self._starts = max(1, len(attempts.parse(text)))

    def add(self, data: bytes) -> None:
        """What the file has grown by; whole lines."""
        self._text = (self._text + data)[: attempts.LIMIT]
        starts, worlds = attempts.parse(self._text), attempts.parse_worlds(self._text)
        if not self._elastic:  # there the new generation says it
            for place in range(self._starts, len(starts)):
                self._put(messages.NodeRestarted(self._node, place, starts[place - 1].why()))
        self._starts = max(self._starts, len(starts))
        for world in worlds[self._worlds :]:
            if world.members[0] == self._node:
                self._moved(RankZeroMoved(self._node, world))
        self._worlds = len(worlds)
        if not self._over and (why := attempts.over(self._text)):
            self._over = True
            self._put(messages.NodeOver(self._node, why))
        if not self._stopped and (by := attempts.stopped_by(self._text)):
            self._stopped = True
            self._put(messages.NodeStopped(self._node, by))
