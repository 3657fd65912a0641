"""python elastic.py torchrun OPTIONS... | command ARGV...: the program on the nodes that there are, without a master.

Every node of a job with min_nodes runs this, under the engine's restart policy. The nodes tell each other their states
(meeting.py) over TCP, and start the program anew in each generation: torchrun with a static rendezvous, whose master
is the generation's first member, on a port of its own: what an older generation still does can never reach it. When a
member is lost, or the program fails, this ends and the engine starts it again, unless no restart is left.

LAUNCHER_MEETING is the job's side of it, as JSON: order, size, least, lost_after, processes (workers a node) and
addresses (`host:port` by node). LAUNCHER_MEETING_KEY signs every message. Beside this file, home/meeting.json keeps
what the node has promised, and home/quiet is there while no output is expected of this node (entry.sh). The program
finds LAUNCHER_GENERATION, LAUNCHER_WORLD, LAUNCHER_RANK (of nodes), LAUNCHER_MASTER, LAUNCHER_FULL_WORLD (workers of a
world that lacks no node) and LAUNCHER_GENERATION_OUTPUT (a folder for its metrics.jsonl and its curves in tensorboard/,
which launchers join with those of the other generations). Python 3.8 without packages.
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
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.container_scripts import meeting
else:
    import meeting  # beside this file

LONGEST = 1 << 20  # sanity limit: bytes of a message
PEER_TIMEOUT = 600.0  # seconds that a node which is done waits for the others
TELL = 0.5  # seconds for the last words of a node to leave it


class Wire:
    """Tells all other nodes this one's state whenever it changes, and every `beat` seconds; hears theirs."""

    def __init__(self, me: meeting.State, addresses: dict[str, str], beat: float, key: bytes) -> None:
        self._told, self._addresses, self._beat, self._key = me, addresses, beat, key
        self._heard: dict[str, meeting.Heard] = {}
        self._changed = threading.Condition()
        self._news = False  # something was heard since the last look
        host, _, port = addresses[me.node].rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server(("", int(port)), family=family, backlog=len(addresses) + 8)
        threading.Thread(target=self._serve, daemon=True).start()
        for node in addresses:
            if node != me.node:
                threading.Thread(target=self._send, args=(node,), daemon=True).start()

    def tell(self, me: meeting.State) -> None:
        with self._changed:
            self._told = me
            self._changed.notify_all()

    def view(self, wait: float) -> dict[str, meeting.Heard]:
        """The last state of each node; returns early when one is heard."""
        with self._changed:
            self._changed.wait_for(lambda: self._news, wait)
            self._news = False
            return dict(self._heard)

    def _send(self, node: str) -> None:
        host, _, port = self._addresses[node].rpartition(":")
        while True:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), self._beat * 4) as link:
                if hasattr(socket, "TCP_USER_TIMEOUT"):  # after a cut the kernel alone would wait longer each time
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._beat * 4000))
                last = None
                while True:
                    with self._changed:
                        while self._told is last:
                            self._changed.wait()
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
                        self._news = True
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
        self._output = Path(os.environ["LAUNCHER_OUTPUT"])
        home = Path(__file__).resolve().parent / "home"
        home.mkdir(exist_ok=True)
        self._file, self._quiet = home / "meeting.json", home / "quiet"
        self._quiet.touch()
        kept = json.loads(self._file.read_text()) if self._file.exists() else {}
        if kept.get("over"):
            sys.exit(f"launcher: this node has ended before: {kept['over']}")
        self._interrupted: float = kept.get("interrupted", 0.0)  # when the last generation here ended, by this clock
        self._me = meeting.begin(os.environ["LAUNCHER_NODE"], kept, time.monotonic())
        self._keep()
        self._told_at = 0.0
        key, own = os.environ.pop("LAUNCHER_MEETING_KEY").encode(), self._job["addresses"][self._me.node]
        try:
            self._wire = Wire(self._me, self._job["addresses"], self._beat, key)
        except OSError as error:
            sys.exit(f"launcher: cannot listen on {own}: {error.strerror}; choose another port: --set port=29501")
        self._program: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._said = ""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._stop)

    def run(self) -> int:
        """Returns the exit code: 0 also where the others have finished without this node."""
        while True:
            view = self._wire.view(self._beat)
            self._advance(meeting.decide(self._rules, self._me, view, time.monotonic()))
            saving = self._stopped and self._program is not None  # it has its time to save, whatever the others do
            if self._me.phase == meeting.ENDED and not saving:
                return self._end()
            if self._program is not None:
                code = self._program.poll()
                if code is not None:
                    return self._ended(code)
            elif self._stopped:
                return 143
            elif self._me.phase == meeting.RUNNING:
                self._start(view)
            else:
                self._say_what_it_waits_for(view)

    def _advance(self, new: meeting.State) -> None:
        """What is promised is on the disk before another node hears of it. Without news, others hear it every beat."""
        news = meeting.told(new) != meeting.told(self._me)
        before, self._me = self._me, new
        if meeting.keep(new) != meeting.keep(before):
            self._keep()
        if news or time.monotonic() - self._told_at >= self._beat:
            self._me = replace(new, beat=new.beat + 1)
            self._told_at = time.monotonic()
            self._wire.tell(self._me)

    def _start(self, view: Mapping[str, meeting.Heard]) -> None:
        """Start the program, as soon as the first member has said where its store will be."""
        me, first = self._me, self._me.members[0]
        if me.node == first:
            port = _free_port()
            self._advance(replace(me, port=port))
        else:
            told = view[first].state if first in view else me
            port = told.port if (told.phase, told.generation) == (meeting.RUNNING, me.generation) else 0
        if not port:
            return
        self._record_world()
        world, rank, processes = len(me.members), me.members.index(me.node), int(self._job["processes"])
        host = self._job["addresses"][first].rpartition(":")[0]
        env = dict(os.environ, LAUNCHER_GENERATION=str(me.generation), LAUNCHER_NODE_RANK=str(rank))
        env.update(LAUNCHER_WORLD=str(world), LAUNCHER_RANK=str(rank), LAUNCHER_MASTER=f"{host}:{port}")
        own = self._output / "generations" / f"{me.generation:04}-{rank}"
        own.mkdir(parents=True, exist_ok=True)
        env.update(LAUNCHER_FULL_WORLD=str(self._rules.size * processes), LAUNCHER_GENERATION_OUTPUT=str(own))
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
        if rank == 0:
            self._quiet.unlink()

    def _record_world(self) -> None:
        """For the log, and for launchers: where in this node's log the generation begins, and who takes part."""
        me, size = self._me, self._rules.size
        lost = ", ".join(node for node in self._rules.order[:size] if node not in me.members)
        when = time.strftime("%H:%M", time.gmtime(self._interrupted or time.time()))
        world = f"rank 0 is now on {me.members[0]}, world {len(me.members)} of {size}"
        world += f": {lost} lost at {when} UTC" if lost else ""
        log, attempts = (self._output / name for name in (f"logs/{me.node}.log", f"state/{me.node}.attempts"))
        with contextlib.suppress(OSError), attempts.open("a") as file:
            file.write(f"generation {me.generation} {log.stat().st_size} {','.join(me.members)} {world}\n")
        self._say(f"generation {me.generation}: {world}")

    def _say_what_it_waits_for(self, view: Mapping[str, meeting.Heard]) -> None:
        heard = [view[node].state for node in self._me.hears]
        masters = [other.members[0] for other in heard if other.phase == meeting.RUNNING]
        if masters:
            text = f"waiting until a node is lost; rank 0 is on {masters[0]}"
        else:
            text = f"waiting for the other nodes; heard: {', '.join(self._me.hears) or 'none'}"
        if text != self._said:
            self._said = text
            self._say(text)

    def _ended(self, code: int) -> int:
        """The program has ended by itself."""
        self._quiet.touch()
        if code != 0 or self._stopped:
            code = code if code >= 0 else 128 - code
            self._advance(replace(self._me, phase=meeting.ENDED, reason=f"the program here ended with {code}"))
            self._end()
            return code
        self._advance(replace(self._me, phase=meeting.DONE))
        deadline = time.monotonic() + PEER_TIMEOUT
        while time.monotonic() < deadline and not self._stopped:
            view = self._wire.view(self._beat)
            self._advance(replace(self._me, hears=meeting.hears(self._rules, view, time.monotonic())))
            if meeting.may_leave(self._rules, view, time.monotonic()):
                break
        time.sleep(TELL)
        return 0

    def _end(self) -> int:
        """Without this generation, or without the job, nothing that its program still does counts."""
        reason = self._me.reason
        if self._program is not None:
            self._program.kill()  # its ranks end with the container
            self._interrupted = time.time()
            self._say(f"generation {self._me.joined} ends here: {reason}")
        else:
            self._say(reason or "the other nodes have finished the job")
        self._keep(over=reason if self._me.last else "")
        time.sleep(TELL)
        return 1 if reason else 0

    def _keep(self, over: str = "") -> None:
        temporary = self._file.with_suffix(".tmp")
        with temporary.open("w") as file:
            json.dump({**meeting.keep(self._me), "interrupted": self._interrupted, "over": over}, file)
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
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    sys.exit(Agent(sys.argv[1:]).run())
