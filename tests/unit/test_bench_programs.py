"""What a simulated node of bench/fanout.py answers in place of a shell are scripts that the launcher still runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from bench.programs.fanout_commands import Commands, run_for_real
from launcher.node import output_folder, shared_memory
from launcher.node.files import FileEntry, Files, Span
from launcher.node.machine import CommandStream, LocalMachine
from launcher.node.ssh.config import quote


class Output(bytearray):
    write = bytearray.extend


class Answer(CommandStream):
    """A command of such a node, which answers once its input has ended; its streams are as asyncssh has them."""

    def __init__(self, commands: Commands, command: str) -> None:
        self._commands, self._command = commands, command
        self._given, self.stdout, self.stderr = b"", Output(), Output()
        self._code: int | None = None

    def send(self, data: bytes) -> None:
        self._given += data

    def end_input(self) -> None:
        self._code = asyncio.run(self._answer())

    async def _answer(self) -> int:
        self.stdin = asyncio.StreamReader()
        self.stdin.feed_data(self._given)
        self.stdin.feed_eof()
        return await self._commands.run(self, self._command)

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        found = bytes(self.stdout), bytes(self.stderr)
        self.stdout.clear()
        self.stderr.clear()
        return found if any(found) else None

    def exit_code(self) -> int:
        assert self._code is not None
        return self._code

    def end(self) -> None: ...

    def close(self) -> None: ...


class Simulated(LocalMachine):
    def __init__(self, home: Path) -> None:
        super().__init__("node1", "bench")
        self._commands = Commands(home, "127.0.0.1", 22, b"", home, home / "bin" / "docker")

    def start(self, argv: Sequence[str], *, stdin: bool, timeout: float) -> CommandStream:
        answer = Answer(self._commands, quote(argv) if stdin else f"{quote(argv)} </dev/null")
        if not stdin:
            answer.end_input()
        return answer


def test_its_answers_are_those_of_the_scripts(tmp_path: Path) -> None:
    simulated, real = Files(Simulated(tmp_path)), Files(LocalMachine("here", "me"))
    output, run = str(tmp_path / "a run"), "job-20260101-000000-aaaa"
    output_folder.make(simulated, output, run, f"{output}/workdir/node1")
    (tmp_path / "a run" / "logs").mkdir()
    (tmp_path / "a run" / "logs" / "node1.log").write_bytes(b"one\ntwo\n")
    (tmp_path / "a run" / "workdir" / "node1" / "data").touch()
    output_folder.make(real, output, run, f"{output}/workdir/node1")  # the same, so that nothing changes

    def by_path(found: Sequence[FileEntry]) -> list[tuple[str, int]]:
        return sorted((each.path, each.size) for each in found)

    assert by_path(simulated.scan(output)) == by_path(real.scan(output))
    assert by_path(simulated.scan(output, few=("workdir", "x"))) == by_path(real.scan(output, few=("workdir", "x")))
    spans = [Span(f"{output}/logs/node1.log", start, 6) for start in (0, 2, -3, 9)]
    spans.append(Span(f"{output}/logs/missing", 0, 1))
    told, known = ([*files.read_spans(spans, below=output)] for files in (simulated, real))
    assert told == known
    simulated.append(f"{output}/logs/node1.log", "", below=output)
    Simulated(tmp_path).script(shared_memory.CLEAR, "0")
    assert not run_for_real
