"""python elastic.py torchrun OPTIONS... | command ARGV...: the program on the nodes that there are, without a master.

Every node of a job with min_nodes runs this, under the engine's restart policy. The nodes tell each other their states
(meeting.py) over TCP, and start the program anew in each generation: torchrun with a static rendezvous, whose master
is the generation's first member, on a port of its own: what an older generation still does can never reach it. When a
member is lost, or the program fails, this ends and the engine starts it again, unless no restart is left.

LAUNCHER_MEETING is the job's side of it, as JSON: order, size, least, lost_after, processes (workers a node) and
addresses (`host:port` by node). LAUNCHER_MEETING_KEY signs every message. Beside this file, home/meeting.json keeps
what the node has promised. The program finds LAUNCHER_GENERATION, LAUNCHER_WORLD, LAUNCHER_RANK (of nodes),
LAUNCHER_MASTER and LAUNCHER_FULL_WORLD (workers of a world that lacks no node). Python 3.7 without packages.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.container_scripts import meeting
else:
    import meeting  # beside this file

LONGEST = 1 << 20  # sanity limit: bytes of a message
PEER_TIMEOUT = 600.0  # seconds that a node which is done waits for the others
GRACE = 10.0  # seconds from SIGTERM to SIGKILL of the program
TELL = 0.5  # seconds for the last words of a node to leave it


class Wire:
    """Tells all other nodes this one's state whenever it changes, and every `beat` seconds; hears theirs."""

    def __init__(self, me: meeting.State, addresses: dict[str, str], beat: float, key: bytes) -> None:
        self._told, self._addresses, self._beat, self._key = me, addresses, beat, key
        self._heard: dict[str, meeting.Heard] = {}
        self._changed = threading.Condition()
        port = int(addresses[me.node].rpartition(":")[2])
        self._server = socket.create_server(("", port), backlog=len(addresses) + 8)
        threading.Thread(target=self._serve, daemon=True).start()
        for node in addresses:
            if node != me.node:
                threading.Thread(target=self._send, args=(node,), daemon=True).start()

    def tell(self, me: meeting.State) -> None:
        with self._changed:
            self._told = me
            self._changed.notify_all()

    def view(self, wait: float) -> dict[str, meeting.Heard]:
        """The last state of each node; returns early when one has been heard."""
        with self._changed:
            self._changed.wait(wait)
            return dict(self._heard)

    def _send(self, node: str) -> None:
        host, _, port = self._addresses[node].rpartition(":")
        while True:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), self._beat * 4) as link:
                last = None
                while True:
                    with self._changed:
                        if self._told is last:
                            self._changed.wait(self._beat)
                        last = self._told
                    link.sendall(self._signed(last))
            time.sleep(self._beat)

    def _serve(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                link, _ = self._server.accept()
                threading.Thread(target=self._listen, args=(link,), daemon=True).start()

    def _listen(self, link: socket.socket) -> None:
        link.settimeout(self._beat * 20)
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError), link, link.makefile("rb") as lines:
            while True:
                line = lines.readline(LONGEST)
                if not line:
                    return
                told = self._checked(line)
                with self._changed:
                    known = self._heard.get(told.node)
                    if known is None or meeting.newer(known.state, told):
                        self._heard[told.node] = meeting.Heard(told, time.monotonic())
                        self._changed.notify_all()

    def _signed(self, state: meeting.State) -> bytes:
        body = json.dumps(asdict(state)).encode()
        return hmac.new(self._key, body, hashlib.sha256).hexdigest().encode() + b" " + body + b"\n"

    def _checked(self, line: bytes) -> meeting.State:
        """Raises ValueError for what no node of this run has signed."""
        mark, _, body = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(mark, hmac.new(self._key, body, hashlib.sha256).hexdigest().encode()):
            raise ValueError("not signed with this run's key")
        told = json.loads(body)
        told.update(members=tuple(told["members"]), hears=tuple(told["hears"]))
        state = meeting.State(**told)
        if state.node not in self._addresses:
            raise ValueError(state.node)
        return state


class Agent:
    """This node, from its start to its end."""

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._job: dict[str, Any] = json.loads(os.environ["LAUNCHER_MEETING"])
        order, lost_after = tuple(self._job["order"]), float(self._job["lost_after"])
        self._rules = meeting.Rules(order, self._job["size"], self._job["least"], lost_after)
        self._beat = min(1.0, lost_after / 15)
        self._file = Path(__file__).resolve().parent / "home" / "meeting.json"
        kept = json.loads(self._file.read_text()) if self._file.exists() else {}
        if kept.get("ended"):
            sys.exit(f"launcher: this node has ended before: {kept['ended']}")
        self._me = meeting.begin(os.environ["LAUNCHER_NODE"], kept, time.monotonic())
        self._keep(self._me)
        key = os.environ.pop("LAUNCHER_MEETING_KEY").encode()
        self._wire = Wire(self._me, self._job["addresses"], self._beat, key)
        self._program: subprocess.Popen[bytes] | None = None
        self._stopped = False
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._stop)

    def run(self) -> int:
        """Returns the exit code: 0 also where the others have finished without this node."""
        said = ""
        while True:
            view = self._wire.view(self._beat)
            self._advance(meeting.decide(self._rules, self._me, view, time.monotonic()))
            if self._me.phase == meeting.ENDED:
                return self._end(self._me.reason)
            if self._me.phase == meeting.RUNNING and self._program is None:
                self._start(view)
            if self._program is not None:
                code = self._program.poll()
                if code is not None:
                    return self._ended(code)
            elif self._stopped:
                return 143
            elif said != (said := ", ".join(self._me.hears)):
                self._say(f"waiting for enough nodes; heard: {said or 'none'}")

    def _advance(self, new: meeting.State) -> None:
        """What is promised is on the disk before another node hears of it."""
        if meeting.keep(new) != meeting.keep(self._me):
            self._keep(new)
        self._me = replace(new, beat=self._me.beat + 1)
        self._wire.tell(self._me)

    def _start(self, view: dict[str, meeting.Heard]) -> None:
        """Start the program, as soon as the first member has said where its store will be."""
        me, first = self._me, self._me.members[0]
        if me.node == first:
            if not me.port:
                self._advance(replace(me, port=_free_port()))
            port = self._me.port
        else:
            told = view[first].state if first in view else me
            port = told.port if (told.phase, told.generation) == (meeting.RUNNING, me.generation) else 0
        if not port:
            return
        world, rank = len(me.members), me.members.index(me.node)
        missing = [node for node in self._rules.order[: self._rules.size] if node not in me.members]
        without = f" without {', '.join(missing)}" if missing else ""
        self._say(f"generation {me.generation}: rank 0 is on {first}, world {world} of {self._rules.size}{without}")
        host, processes = self._job["addresses"][first].rpartition(":")[0], int(self._job["processes"])
        env = dict(os.environ, LAUNCHER_GENERATION=str(me.generation), LAUNCHER_NODE_RANK=str(rank))
        env.update(LAUNCHER_WORLD=str(world), LAUNCHER_RANK=str(rank), LAUNCHER_MASTER=f"{host}:{port}")
        env.update(LAUNCHER_FULL_WORLD=str(self._rules.size * processes))
        kind, *rest = self._argv
        if kind == "torchrun":
            shape = {"nnodes": world, "node_rank": rank, "nproc_per_node": processes, "master_addr": host}
            shape.update(master_port=port, rdzv_backend="static", max_restarts=0)
            shape["rdzv_id"] = f"{os.environ['LAUNCHER_RUN']}-{me.generation}"
            options = [word for name, value in shape.items() for word in (f"--{name}", str(value))]
            rest = [sys.executable, "-m", "torch.distributed.run", *options, *rest]
        else:
            env.update(MASTER_ADDR=host, MASTER_PORT=str(port), WORLD_SIZE=str(world), RANK=str(rank))
            env.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        self._program = subprocess.Popen(rest, env=env)

    def _ended(self, code: int) -> int:
        """The program has ended by itself."""
        if code != 0 or self._stopped:
            self._advance(replace(self._me, phase=meeting.ENDED, reason=f"its program ended with {code}"))
            time.sleep(TELL)
            return code if code >= 0 else 128 - code
        self._advance(replace(self._me, phase=meeting.DONE))
        deadline = time.monotonic() + PEER_TIMEOUT
        while time.monotonic() < deadline and not self._stopped:
            view = self._wire.view(self._beat)
            self._advance(replace(self._me, hears=meeting.hears(self._rules, view, time.monotonic())))
            if meeting.may_leave(self._rules, view, time.monotonic()):
                break
        time.sleep(TELL)
        return 0

    def _end(self, reason: str) -> int:
        self._say(f"generation {self._me.joined} ends here: {reason}" if reason else "the others have finished the job")
        if self._program is not None:
            self._program.terminate()
            try:
                self._program.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._program.kill()
        if self._me.last and reason:
            self._keep(self._me, ended=reason)
        time.sleep(TELL)
        return 1 if reason else 0

    def _keep(self, state: meeting.State, **more: str) -> None:
        temporary = self._file.with_suffix(".tmp")
        self._file.parent.mkdir(exist_ok=True)
        with temporary.open("w") as file:
            json.dump({**meeting.keep(state), **more}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._file)

    def _stop(self, number: int, _frame: object) -> None:
        self._stopped = True
        if self._program is not None:
            self._program.send_signal(number)

    def _say(self, text: str) -> None:
        print(f"launcher: {text}", file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        port: int = sock.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(Agent(sys.argv[1:]).run())
