"""How a simulated node answers commands.

Commands run in a real shell, in the node's own folder, except these, which are answered in this process:

- the launcher's facts script: its output on this machine, recorded once, with the node's own home, port and time;
- the search and clean-up of /dev/shm, because that folder is this machine's: answered as if nothing were there;
- the uid of the node's user: this process's;
- the scripts of launcher/node/files.py that run on every node: make a folder, list one, send files, follow them. Their
  effect on the files is the same. A shell and its tools would take some milliseconds of CPU time, on a real node the
  node's own; 256 times that on this machine's cores would measure this machine instead of the launcher;
- the baseline's commands (`docker run`, `docker rm`, `cat`), which skip the shell for the same reason.

`docker` is a program that does nothing, so that no script reaches this machine's Docker engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NoReturn

from launcher.model.limits import DEFAULT_LIMITS
from launcher.node import engine, facts, output_folder, shared_memory
from launcher.node.files import Files, Span
from launcher.node.machine import Machine
from launcher.node.ssh.config import quote

TEMPLATE_CONNECTION = "198.18.255.1 54321 198.18.255.1 54322"  # replaced by a node's own
BOUNDED = re.compile(r"timeout -s KILL \S+ (?=sh -c )")  # as launcher.node.opened.bounded begins
POLL = 0.2  # seconds, as in the script's `tail -s`
BASELINE = ("docker run ", "docker rm ")
QUOTED = quote(["!"]).rpartition(" ")[0]  # start of commands that shells parse differently

Process = Any  # asyncssh.SSHServerProcess[bytes]
Answer = Callable[[Process, Sequence[str]], Awaitable[int]]

run_for_real: Counter[str] = Counter()  # commands run in a real shell, by their beginning


class _Asked(Exception):  # noqa: N818 - control flow, not an error
    def __init__(self, argv: Sequence[str]) -> None:
        super().__init__()
        self.script = argv[argv.index("-c") + 1]  # of [timeout ...] sh -c SCRIPT ARGUMENTS


class _Recorder(Machine):
    """Runs nothing: raises the command."""

    node = user = "recorder"
    limits = DEFAULT_LIMITS

    def start(self, argv: Sequence[str], *, stdin: bool, timeout: float) -> NoReturn:  # noqa: ARG002 - nothing is run
        raise _Asked(argv)


def script_of(ask: Callable[[Files], object]) -> str:
    """Return the script that Files runs for `ask`."""
    try:
        ask(Files(_Recorder()))
    except _Asked as asked:
        return asked.script
    raise AssertionError("nothing was run")


def node_address(number: int) -> str:
    """The loopback address of node `number`, counted from 1."""
    return f"127.0.{number >> 8}.{number & 255}"


class Commands:
    """The commands of one node. `recorded`: the output of the launcher's facts script with HOME at `template`.

    `address`: a loopback address of this node, since nodes with the same address could not reach each other.
    """

    def __init__(self, home: Path, address: str, port: int, recorded: bytes, template: Path, docker: Path) -> None:
        self._home = home
        self._connection = f"127.0.0.1 1 127.0.0.1 {port}"
        own = {str(template): str(home), TEMPLATE_CONNECTION: self._connection, "inet 127.0.0.1/": f"inet {address}/"}
        self._recorded = functools.reduce(lambda text, pair: text.replace(*pair), _encoded(own), recorded)
        self._environment = {
            "HOME": str(home),
            "PATH": f"{docker.parent}:/usr/bin:/bin",
            "SSH_CONNECTION": self._connection,
            "USER": "bench",
        }
        self._scripts: dict[str, Answer] = {
            facts.script(): self._facts,
            shared_memory.CLEAR: self._nothing,
            shared_memory.LEFT: self._nothing,
            script_of(lambda files: files.append("/x/y", "", below="/x")): self._nothing,
            engine.UID: self._uid,
            script_of(lambda files: output_folder.make(files, "/x", "x", "/x/y")): self._make_output,
            script_of(lambda files: files.scan("/x")): self._scan,
            script_of(lambda files: next(files.read_spans([Span("/x/y", 0, 1)], below="/x"))): self._spans,
            script_of(lambda files: files.tail("/x/y", 0, {}, below="/x")): self._follow,
        }

    async def run(self, process: Process, command: str) -> int:
        """Answers the command; returns its exit code."""
        command = command.removesuffix(" </dev/null")
        if command.startswith(QUOTED):
            text = shlex.split(command)[-1]
            command = re.sub(r"\\0(\d{3})", lambda found: chr(int(found[1], 8)), text)
        if (command := BOUNDED.sub("", command, count=1)).startswith("sh -c "):
            _, _, script, *arguments = shlex.split(command)
            if answer := self._scripts.get(script):
                return await answer(process, arguments[1:])
        if command.startswith(BASELINE):
            return await self._nothing(process, ())
        if command.startswith("cat ") and shlex.quote(command[4:]) == command[4:]:
            process.stdout.write(b"".join(path.read_bytes() for path in sorted((self._home / command[4:]).iterdir())))
            return 0
        return await self._for_real(process, command)

    async def _facts(self, process: Process, _: Sequence[str]) -> int:
        process.stdout.write(re.sub(rb"(?<=@@time\n)\d+\.\d+", b"%.6f" % time.time(), self._recorded))
        return 0

    async def _nothing(self, _: Process, __: Sequence[str]) -> int:
        return 0

    async def _uid(self, process: Process, _: Sequence[str]) -> int:
        process.stdout.write(b"@@uid %d\n" % os.getuid())
        return 0

    async def _make_output(self, _: Process, arguments: Sequence[str]) -> int:
        folder, run, workdir, _ = arguments  # and the purpose: every one is a run's here
        Path(folder).mkdir(0o700, parents=True, exist_ok=True)
        Path(folder, output_folder.MARKER).write_text(f"{run}\n")
        Path(workdir).mkdir(parents=True, exist_ok=True)
        return 0

    async def _scan(self, process: Process, arguments: Sequence[str]) -> int:
        root, few, named = Path(*arguments[:2]), arguments[2], arguments[3]
        if not root.is_dir():
            process.stderr.write(b"ls: cannot access '%s': No such file or directory\n" % bytes(root))
            return 2
        for path in root.rglob("*"):
            name = path.relative_to(root)
            if path.is_file() and not (fnmatch(f"./{name}", few) and not fnmatch(path.name, named)):
                found = path.stat()
                process.stdout.write(b"f %d %.6f %s\0" % (found.st_size, found.st_mtime, bytes(name)))
        return 0

    async def _spans(self, process: Process, arguments: Sequence[str]) -> int:
        folder, mark = arguments[0], arguments[1].encode() + b"\n"
        process.stdout.write(mark)
        for line in (await process.stdin.read()).splitlines():
            offset, length, path = line.split(b" ", 2)
            data = b""
            with contextlib.suppress(OSError), Path(folder, os.fsdecode(path)).open("rb") as file:
                file.seek(int(offset), os.SEEK_SET if int(offset) >= 0 else os.SEEK_END)
                data = file.read(min(int(length), os.fstat(file.fileno()).st_size))
            process.stdout.write(b"%d\n%s%s" % (len(data), data, mark))
        return 0

    async def _follow(self, process: Process, arguments: Sequence[str]) -> int:
        """Runs until stdin ends."""
        ended = asyncio.create_task(process.stdin.read())
        folder, *pairs = arguments
        positions = [int(offset) - 1 for offset in pairs[1::2]]
        while not ended.done():
            for number, name in enumerate(pairs[::2]):
                data = b""
                with contextlib.suppress(OSError), Path(folder, name).open("rb") as file:
                    file.seek(positions[number])
                    data = file.read()
                if number:
                    whole = data[: data.rfind(b"\n") + 1]
                    positions[number] += len(whole)
                    for line in whole.splitlines(keepends=True):
                        process.stderr.write(b"%d %s" % (number - 1, line))
                elif data:
                    positions[0] += len(data)
                    process.stdout.write(data)
            await asyncio.wait({ended}, timeout=POLL)
        return 143

    async def _for_real(self, process: Process, command: str) -> int:
        run_for_real[command[:60]] += 1
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *("sh", "-c", command), cwd=self._home, env=self._environment,
            stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True,
        )  # fmt: skip
        feeding = asyncio.create_task(_copy(process.stdin, child.stdin))
        try:
            await asyncio.gather(_copy(child.stdout, process.stdout), _copy(child.stderr, process.stderr))
            code = await child.wait()
        finally:  # the channel may have closed before the command ended
            feeding.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        return code if code >= 0 else 128 - code


async def _copy(source: Any, target: Any) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await source.read(1 << 16):
            target.write(piece)
            await target.drain()
        if isinstance(target, asyncio.StreamWriter):
            target.close()


def _encoded(pairs: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(old.encode(), new.encode()) for old, new in pairs.items()]


def record_facts(template: Path) -> bytes:
    """The output of the launcher's facts script on this machine, with HOME at `template`."""
    environment = {**os.environ, "HOME": str(template), "SSH_CONNECTION": TEMPLATE_CONNECTION}
    return subprocess.run(["sh", "-c", facts.script()], env=environment, stdout=subprocess.PIPE, check=True).stdout
