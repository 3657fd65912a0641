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
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.container_scripts import meeting, words
    from launcher.container_scripts.begun import Begun
    from launcher.container_scripts.ends import sitting_out
    from launcher.container_scripts.wire import Wire
else:
    import meeting  # beside this file, as the others
    import words
    from begun import Begun
    from ends import sitting_out
    from wire import Wire

FLUSH = 0.2  # seconds in which tee has written the last that a program printed
PEER_TIMEOUT = 600.0  # seconds that a node which is done waits for the others
TELL = 0.5  # seconds for the last words of a node to leave it
OVER = 15.0  # seconds in which the others hear that the run is over, and launchers stop it before it is started again


class Agent:
    """This node, from its start to its end."""

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._job: dict[str, Any] = json.loads(os.environ["LAUNCHER_MEETING"])
        order, lost_after = tuple(self._job["order"]), float(self._job["lost_after"])
        self._rules = meeting.Rules(order, self._job["size"], self._job["least"], lost_after)
        self._output = Path(os.environ["LAUNCHER_OUTPUT"])
        self._home = Path(__file__).resolve().parent / "home"
        self._home.mkdir(exist_ok=True)
        self._quiet.touch()
        kept = json.loads(self._file.read_text()) if self._file.exists() else {}
        if kept.get("over"):
            self._say(f"this node has ended before: {kept['over']}")
            sys.exit(kept.get("code", 1))
        self._code: int = kept.get("code", 1)  # with which the last generation ended here
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
        self._begun: Begun | None = None
        self._stopped = False
        self._said = ""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._stop)

    @property
    def _beat(self) -> float:
        """Seconds between two messages to the others."""
        return min(1.0, self._rules.lost_after / 15)

    @property
    def _file(self) -> Path:
        """What the node remembers of the meeting when its container is started again."""
        return self._home / "meeting.json"

    @property
    def _quiet(self) -> Path:
        """While it is there, entry.sh does not take silence for a hang."""
        return self._home / "quiet"

    def run(self) -> int:
        """Returns the exit code: 0 also where the others have finished without this node."""
        while True:
            view = self._wire.view(self._beat)
            new = meeting.decide(self._rules, self._me, view, time.monotonic())
            if self._program is not None and new.phase == meeting.ENDED:
                new = self._reached(new)
            self._advance(new)
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
                try:
                    self._start(view)
                except OSError as error:  # no such command, or a full disk
                    why = words.steady(str(error))
                    return self._failed(1, f"the program here could not be started: {error}", why)
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
        log = self._output / f"logs/{me.node}.log"
        world, rank, processes = len(me.members), me.members.index(me.node), int(self._job["processes"])
        host = self._job["addresses"][first].rpartition(":")[0]
        env = dict(os.environ, LAUNCHER_GENERATION=str(me.generation), LAUNCHER_NODE_RANK=str(rank))
        env.update(LAUNCHER_WORLD=str(world), LAUNCHER_RANK=str(rank), LAUNCHER_MASTER=f"{host}:{port}")
        own = self._output / "generations" / f"{me.generation:04}-{rank}"
        self._begun, self._code = Begun(own, log, self._record_world(log)), 1
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
        threading.Thread(target=self._wait, args=(self._program,), daemon=True).start()
        if rank == 0:
            self._quiet.unlink()

    def _wait(self, program: subprocess.Popen[bytes]) -> None:
        """Who fails first is heard first: the other programs that fail within a moment do so because of that."""
        program.wait()
        self._wire.wake()

    def _record_world(self, log: Path) -> int:
        """For the log, and for launchers: who takes part; returns the bytes that the log had before the generation."""
        me, size = self._me, self._rules.size
        costs = {node: known for node, known in sitting_out(me.ends).items() if node in me.hears}
        lost = ", ".join(node for node in self._rules.order[:size] if node not in (*me.members, *costs))
        when = time.strftime("%H:%M", time.gmtime(self._interrupted or time.time()))
        why = [f"{lost} lost at {when} UTC"] if lost else []
        why += [_sits_out(node, known, "it") for node, known in costs.items() if node not in me.members]
        world = f"rank 0 is now on {me.members[0]}, world {len(me.members)} of {size}"
        world += f": {'; '.join(why)}" if why else ""
        begins = log.stat().st_size if log.exists() else 0
        self._note(f"generation {me.generation} {begins} {','.join(me.members)} {world}")
        self._say(f"generation {me.generation}: {world}")
        return begins

    def _note(self, line: str) -> None:
        """For launchers; a full disk must not end the job."""
        with contextlib.suppress(OSError), (self._output / f"state/{self._me.node}.attempts").open("a") as file:
            file.write(f"{words.plain(line)}\n")

    def _say_what_it_waits_for(self, view: Mapping[str, meeting.Heard]) -> None:
        heard = [view[node].state for node in self._me.hears]
        running = next((other for other in heard if other.phase == meeting.RUNNING), None)
        if running is not None:
            costs = sitting_out(running.ends).get(self._me.node)
            text = _sits_out("", costs, "this node") if costs else "waiting until a node is lost"
            text = f"{text.strip()}; rank 0 is on {running.members[0]}"
        else:
            text = f"waiting for the other nodes; heard: {', '.join(self._me.hears) or 'none'}"
        if text != self._said:
            self._said = text
            self._say(text)

    def _ended(self, code: int) -> int:
        """The program has ended by itself."""
        with contextlib.suppress(OSError):  # a full disk
            self._quiet.touch()
        if code != 0 or self._stopped:
            code = code if code >= 0 else 128 - code
            error = ""
            if self._begun is not None and not self._stopped:
                time.sleep(FLUSH)
                error = self._begun.error(code, torchrun=self._argv[0] == "torchrun")
            return self._failed(code, f"the program here ended with {code}", error)
        self._advance(replace(self._me, phase=meeting.DONE))
        self._stay(PEER_TIMEOUT)
        time.sleep(TELL)
        return 0

    def _stay(self, seconds: float) -> None:
        """Tell the others how this node has ended, until they have as well."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stopped:
            view = self._wire.view(self._beat)
            self._advance(replace(self._me, hears=meeting.hears(self._rules, view, time.monotonic())))
            if self._me.phase == meeting.DONE and meeting.may_leave(self._rules, view, time.monotonic()):
                break

    def _failed(self, code: int, reason: str, error: str) -> int:
        self._code = code
        new = meeting.program_failed(self._me, self._wire.view(0), time.monotonic(), reason, error)
        with contextlib.suppress(OSError):  # a full disk: the others will see that it starts again
            self._advance(self._reached(new))
        self._end()
        return code

    def _reached(self, new: meeting.State) -> meeting.State:
        further = 1 + max((end.step for end in self._me.ends), default=0)
        return meeting.reached(new, self._begun.step(further) if self._begun else 0)

    def _end(self) -> int:
        """Without this generation, or without the job, nothing that its program still does counts."""
        me, reason = self._me, self._me.reason
        if self._program is not None:
            self._program.kill()  # its ranks end with the container
        if self._begun is not None:
            self._interrupted = time.time()
            self._say(f"generation {me.joined} ends here: {reason}")
            nodes = next((end.nodes for end in me.ends if end.generation == me.joined), ())
            self._note(f"ended {me.joined} {','.join(nodes) or '-'} {reason}")
        else:
            self._say(reason or "the other nodes have finished the job")
        with contextlib.suppress(OSError):  # a full disk: this node is then blamed
            self._keep(over=reason if me.last else "")
        if me.over:
            self._note(f"over {reason}")
            self._stay(OVER)
        time.sleep(TELL)
        return (self._code if me.over else 1) if reason else 0

    def _keep(self, over: str = "") -> None:
        temporary = self._file.with_suffix(".tmp")
        with temporary.open("w") as file:
            more = {"interrupted": self._interrupted, "over": over, "code": self._code}
            json.dump({**meeting.keep(self._me), **more}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._file)

    def _stop(self, number: int, _frame: object) -> None:
        self._stopped = True
        if self._program is not None:
            self._program.send_signal(number)

    def _say(self, text: str) -> None:
        print(f"launcher: {text}", file=sys.stderr, flush=True)


def _sits_out(node: str, costs: Sequence[int], why: str) -> str:
    return f"{node} sits out, as generations {', '.join(map(str, costs))} ended because of {why}"


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    sys.exit(Agent(sys.argv[1:]).run())
