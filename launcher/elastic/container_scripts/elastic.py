"""python elastic.py torchrun OPTIONS... | command ARGV...: the program on the available nodes, without a fixed master.

Every node of a job with min_nodes runs this script, under the engine's restart policy. The nodes exchange their states
(meeting.py) over TCP and restart the program in each generation: torchrun with a static rendezvous on the generation's
first member, with a new port, so that processes of an older generation cannot connect. When a member is lost or the
program fails, the script exits and the engine restarts it, unless no restarts are left.

LAUNCHER_MEETING contains the job's settings as JSON: order, size, least, lost_after, processes (workers per node) and
addresses (`host:port` by node). LAUNCHER_MEETING_KEY is the key that signs every message. In the folder of this file,
home/meeting.json stores the node's promises, and home/quiet exists while this node is not expected to print output
(entry.sh). The program gets LAUNCHER_GENERATION, LAUNCHER_WORLD, LAUNCHER_RANK (of nodes), LAUNCHER_MASTER,
LAUNCHER_FULL_WORLD (number of workers if no node is missing) and LAUNCHER_GENERATION_OUTPUT (a folder for its
metrics.jsonl and for tensorboard/, which launchers merge with those of other generations). Python 3.8 without packages.
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
    from launcher.container_scripts import words
    from launcher.elastic.container_scripts import meeting
    from launcher.elastic.container_scripts.begun import StartedGeneration
    from launcher.elastic.container_scripts.ends import away, sitting_out
    from launcher.elastic.container_scripts.wire import Wire
else:
    import meeting  # in the same folder, like the others
    import words
    from begun import StartedGeneration
    from ends import away, sitting_out
    from wire import Wire

FLUSH = 0.2  # seconds for tee to write the last output of the program
OTHERS_TIMEOUT = 600.0  # seconds that a finished node waits for the others
TELL = 0.5  # seconds to send the last state of a node
OVER = 15.0  # seconds to announce that the run is over, and for launchers to stop it before the engine restarts it


class Agent:
    """One node in one start of its container."""

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
            self._log(f"this node has already stopped: {kept['over']}")
            sys.exit(kept.get("code", 1))
        self._code: int = kept.get("code", 1)  # exit code of the last generation on this node
        self._interrupted: float = kept.get("interrupted", 0.0)  # when the last generation ended on this node
        self._me = meeting.begin(os.environ["LAUNCHER_NODE"], kept, time.monotonic())
        self._keep()
        self._sent_at = 0.0
        key, own = os.environ.pop("LAUNCHER_MEETING_KEY").encode(), self._job["addresses"][self._me.node]
        try:
            self._wire = Wire(self._me, self._job["addresses"], self._beat, key)
        except OSError as error:
            sys.exit(f"launcher: cannot listen on {own}: {error.strerror}; choose another port: --set port=29501")
        self._program: subprocess.Popen[bytes] | None = None
        self._current: StartedGeneration | None = None
        self._stopped = False
        self._last_logged = ""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._stop)

    @property
    def _beat(self) -> float:
        """Seconds between two messages to the other nodes."""
        return min(1.0, self._rules.lost_after / 15)

    @property
    def _file(self) -> Path:
        """State of the node that persists across restarts of its container."""
        return self._home / "meeting.json"

    @property
    def _quiet(self) -> Path:
        """While this file exists, entry.sh does not treat missing output as a hang."""
        return self._home / "quiet"

    def run(self) -> int:
        """Return the exit code; also 0 if the other nodes finished without this one."""
        while True:
            view = self._wire.view(self._beat)
            new = meeting.decide(self._rules, self._me, view, time.monotonic())
            if self._program is not None and new.phase == meeting.ENDED:
                new = self._reached(new)
            self._advance(new)
            saving = self._stopped and self._program is not None  # it may still save, whatever other nodes do
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
                    why = words.normalized(str(error))
                    return self._failed(1, f"the program could not be started: {error}", why)
            else:
                self._log_waiting(view)

    def _advance(self, new: meeting.State) -> None:
        """Write promises to disk before sending them. An unchanged state is sent again every beat."""
        news = meeting.announced(new) != meeting.announced(self._me)
        before, self._me = self._me, new
        if meeting.keep(new) != meeting.keep(before):
            self._keep()
        if news or time.monotonic() - self._sent_at >= self._beat:
            self._me = replace(new, beat=new.beat + 1)
            self._sent_at = time.monotonic()
            self._wire.tell(self._me)

    def _start(self, view: Mapping[str, meeting.Heard]) -> None:
        """Start the program as soon as the first member has announced the port of its store."""
        me, first = self._me, self._me.members[0]
        if me.node == first:
            port = _free_port()
            self._advance(replace(me, port=port))
        else:
            state = view[first].state if first in view else me
            port = state.port if (state.phase, state.generation) == (meeting.RUNNING, me.generation) else 0
        if not port:
            return
        log = self._output / f"logs/{me.node}.log"
        world, rank, processes = len(me.members), me.members.index(me.node), int(self._job["processes"])
        host = self._job["addresses"][first].rpartition(":")[0]
        env = dict(os.environ, LAUNCHER_GENERATION=str(me.generation), LAUNCHER_NODE_RANK=str(rank))
        env.update(LAUNCHER_WORLD=str(world), LAUNCHER_RANK=str(rank), LAUNCHER_MASTER=f"{host}:{port}")
        own = self._output / "generations" / f"{me.generation:04}-{rank}"
        self._current, self._code = StartedGeneration(own, log, self._record_world(log)), 1
        own.mkdir(parents=True, exist_ok=True)
        env.update(LAUNCHER_FULL_WORLD=str(self._rules.size * processes), LAUNCHER_GENERATION_OUTPUT=str(own))
        kind, *rest = self._argv
        if kind == "torchrun":
            shape = {"nnodes": world, "node_rank": rank, "nproc_per_node": processes, "master_addr": host}
            shape.update(master_port=port, rdzv_backend="static", max_restarts=0)
            shape["rdzv_id"] = f"{os.environ['LAUNCHER_RUN']}-{me.generation}"
            options = [part for name, value in shape.items() for part in (f"--{name}", str(value))]
            rest = [sys.executable, str(Path(__file__).with_name("torchrun.py")), *options, *rest]
        else:
            env.update(MASTER_ADDR=host, MASTER_PORT=str(port), WORLD_SIZE=str(world), RANK=str(rank))
            env.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        self._program = subprocess.Popen(rest, env=env)
        threading.Thread(target=self._wait, args=(self._program,), daemon=True).start()
        if rank == 0:
            self._quiet.unlink()

    def _wait(self, program: subprocess.Popen[bytes]) -> None:
        """Announce a failure immediately: programs on other nodes that fail shortly after it do so because of it."""
        program.wait()
        self._wire.wake()

    def _record_world(self, log: Path) -> int:
        """Record the members in the log and for launchers; return the size of the log before the generation."""
        me, size = self._me, self._rules.size
        costs = {node: known for node, known in sitting_out(me.ends).items() if node in me.hears}
        missing = [node for node in self._rules.order[:size] if node not in (*me.members, *costs)]
        when = time.strftime("%H:%M UTC", time.gmtime(self._interrupted or time.time()))
        why = away(missing, me.ends, when)
        why += [_sits_out(node, known, "it") for node, known in costs.items() if node not in me.members]
        world = f"rank 0 is now on {me.members[0]}, world {len(me.members)} of {size}"
        world += f": {'; '.join(why)}" if why else ""
        offset = log.stat().st_size if log.exists() else 0
        self._note(f"generation {me.generation} {offset} {','.join(me.members)} {world}")
        self._log(f"generation {me.generation}: {world}")
        return offset

    def _note(self, line: str) -> None:
        """Append a line for launchers. A full disk must not stop the job."""
        with contextlib.suppress(OSError), (self._output / f"state/{self._me.node}.attempts").open("a") as file:
            file.write(f"{words.plain(line)}\n")

    def _log_waiting(self, view: Mapping[str, meeting.Heard]) -> None:
        heard = [view[node].state for node in self._me.hears]
        running = next((other for other in heard if other.phase == meeting.RUNNING), None)
        if running is not None:
            costs = sitting_out(running.ends).get(self._me.node)
            text = _sits_out("", costs, "this node") if costs else "waiting until a node is lost"
            text = f"{text.strip()}; rank 0 is on {running.members[0]}"
        else:
            text = f"waiting for the other nodes; reachable: {', '.join(self._me.hears) or 'none'}"
        if text != self._last_logged:
            self._last_logged = text
            self._log(text)

    def _ended(self, code: int) -> int:
        """Handle the exit of the program."""
        with contextlib.suppress(OSError):  # a full disk
            self._quiet.touch()
        if code != 0 or self._stopped:
            code = code if code >= 0 else 128 - code
            error = ""
            if self._current is not None and not self._stopped:
                time.sleep(FLUSH)
                error = self._current.error(code, torchrun=self._argv[0] == "torchrun")
            return self._failed(code, f"the program exited with code {code}", error)
        self._advance(replace(self._me, phase=meeting.DONE))
        self._stay(OTHERS_TIMEOUT)
        time.sleep(TELL)
        return 0

    def _stay(self, seconds: float) -> None:
        """Announce how this node ended until the other nodes have ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stopped:
            view = self._wire.view(self._beat)
            self._advance(replace(self._me, hears=meeting.hears(self._rules, view, time.monotonic())))
            if self._me.phase == meeting.DONE and meeting.may_leave(self._rules, view, time.monotonic()):
                break

    def _failed(self, code: int, reason: str, error: str) -> int:
        self._code = code
        new = meeting.program_failed(self._me, self._wire.view(0), time.monotonic(), reason, error)
        with contextlib.suppress(OSError):  # a full disk: the other nodes will notice the restart
            self._advance(self._reached(new))
        self._end()
        return code

    def _reached(self, new: meeting.State) -> meeting.State:
        further = 1 + max((end.step for end in self._me.ends), default=0)
        return meeting.reached(new, self._current.step(further) if self._current else 0)

    def _end(self) -> int:
        """End the generation or the job: kill the program and record the reason."""
        me, reason = self._me, self._me.reason
        if self._program is not None:
            self._program.kill()  # its ranks exit with the container
        if self._current is not None:
            self._interrupted = time.time()
            self._log(f"generation {me.joined} ended on this node: {reason}")
            nodes = next((end.nodes for end in me.ends if end.generation == me.joined), ())
            self._note(f"ended {me.joined} {','.join(nodes) or '-'} {reason}")
        else:
            self._log(reason or "the other nodes have finished the job")
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

    def _log(self, text: str) -> None:
        print(f"launcher: {text}", file=sys.stderr, flush=True)


def _sits_out(node: str, costs: Sequence[int], why: str) -> str:
    return f"{node} sits out, as generations {', '.join(map(str, costs))} ended because of {why}"


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    sys.exit(Agent(sys.argv[1:]).run())
