"""The entry script under every common shell: what it runs, what it logs, how it ends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher import container_scripts

SHELLS = [name for name in ("dash", "bash", "busybox") if shutil.which(name)]
STRANGER = 54321  # a uid that is not in /etc/passwd


@dataclass
class Box:
    """The scripts and an output folder, as an engine lays them out; `run` is one attempt."""

    root: Path
    shell: str
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.kit / "home").mkdir(parents=True)
        for name, text in container_scripts.scripts().items():
            (self.kit / name).write_bytes(text)
        self.output.mkdir()
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root),
            "LAUNCHER_OUTPUT": str(self.output),
            "LAUNCHER_NODE": "gpu-a",
        }
        if self.shell == "busybox":  # and no tool of coreutils
            tools = self.root / "applets"
            tools.mkdir()
            subprocess.run(["busybox", "--install", "-s", tools], check=True)
            self.env["PATH"] = str(tools)

    @property
    def kit(self) -> Path:
        return self.root / "kit"

    @property
    def output(self) -> Path:
        return self.root / "out"

    @property
    def log(self) -> Path:
        return self.output / "logs" / "gpu-a.log"

    @property
    def attempts(self) -> list[str]:
        return (self.output / "state" / "gpu-a.attempts").read_text().splitlines()

    def secret(self, name: str, value: bytes) -> None:
        folder = self.kit / "secrets"
        folder.mkdir(exist_ok=True, mode=0o700)
        (folder / name).write_bytes(value)
        (folder / name).chmod(0o600)

    def argv(self, *argv: str) -> list[str]:
        sh = [shutil.which("busybox") or "", "sh"] if self.shell == "busybox" else [shutil.which(self.shell) or ""]
        return [*sh, str(self.kit / "entry.sh"), *argv]

    def start(self, *argv: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.argv(*argv),
            env=self.env | dict(env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, *argv: str, env: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """(exit code, the content of Docker's log)."""
        process = self.start(*argv, env=env)
        out, _ = process.communicate(timeout=60)
        return process.returncode, out

    def until(self, text: bytes) -> None:
        deadline = time.monotonic() + 20
        while text not in (self.log.read_bytes() if self.log.exists() else b""):
            assert time.monotonic() < deadline, f"{text!r} is not in the log"
            time.sleep(0.01)


@pytest.fixture(params=SHELLS)
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Box:
    return Box(tmp_path, request.param)


@pytest.fixture
def one(tmp_path: Path) -> Box:
    """For tests in which the shell makes no difference."""
    return Box(tmp_path, SHELLS[0])


@pytest.mark.parametrize("code", [0, 1, 3, 127, 143, 255])
def test_the_exit_code_is_the_programs_own(box: Box, code: int) -> None:
    assert box.run("/bin/sh", "-c", f"exit {code}")[0] == code
    assert [line.split()[:2] for line in box.attempts][1] == ["exit", str(code)]


def test_a_program_killed_by_a_signal_gives_128_and_the_signal(box: Box) -> None:
    assert box.run("/bin/sh", "-c", "kill -9 $$")[0] == 137


def test_a_missing_program_is_named(box: Box) -> None:
    code, out = box.run("no-such-program", "x")
    assert code == 127
    assert b"no-such-program" in out
    assert b"no-such-program" in box.log.read_bytes()


def test_a_program_with_the_name_of_a_script_function_is_run(box: Box) -> None:
    tool = box.root / "tools" / "note"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho the tool\n")
    tool.chmod(0o755)
    assert b"the tool" in box.run("note", env={"PATH": f"{tool.parent}:{box.env['PATH']}"})[1]


def test_stdout_and_stderr_are_merged_in_order_in_file_and_stream(box: Box) -> None:
    code, out = box.run("/bin/sh", "-c", "for i in 1 2 3 4 5 6 7 8; do echo o$i; echo e$i >&2; done; printf last")
    expected = b"".join(b"o%d\ne%d\n" % (i, i) for i in range(1, 9)) + b"last"
    assert (code, out, box.log.read_bytes()) == (0, expected, expected)


def test_arguments_arrive_unchanged(box: Box) -> None:
    odd = ["a b", "", "*", "$HOME", "q\"u`o'te", "new\nline", "-n", "x=y", "\\"]
    out = box.run(sys.executable, "-c", "import sys; print(sys.argv[1:])", *odd)[1]
    assert out.decode() == f"{odd}\n"


def test_long_lines_bursts_and_any_bytes_arrive(box: Box) -> None:
    program = "import os; d = bytes(range(256)) * 4096; os.write(1, b''); [os.write(i % 2 + 1, d) for i in range(6)]"
    code, out = box.run(sys.executable, "-c", program)
    assert code == 0
    assert out == box.log.read_bytes() == bytes(range(256)) * 4096 * 6


def test_a_hundred_thousand_lines_arrive(box: Box) -> None:
    out = box.run(sys.executable, "-c", "for i in range(100_000): print(i, 'x' * 20)")[1]
    assert out == box.log.read_bytes()
    assert out.count(b"\n") == 100_000


def test_restarts_append_and_are_counted(box: Box) -> None:
    for attempt, code in enumerate((1, 0)):
        assert box.run("/bin/sh", "-c", f"echo attempt {attempt}; exit {code}")[0] == code
    assert box.log.read_bytes() == b"attempt 0\nattempt 1\n"
    assert [re.sub(r"\d{10,}", "T", line) for line in box.attempts] == ["start T", "exit 1 T", "start T", "exit 0 T"]


def test_the_clock_file_tells_when_a_byte_was_written(box: Box) -> None:
    before = int(time.time())
    box.run("/bin/sh", "-c", "echo one; sleep 2.3; echo two")
    notes = [tuple(map(int, line.split())) for line in (box.output / "logs" / "gpu-a.clock").read_text().splitlines()]
    at_four = min(moment for moment, size in notes if size >= 4)
    at_eight = min(moment for moment, size in notes if size >= 8)
    assert before <= at_four <= before + 2
    assert at_eight - at_four in (2, 3)
    assert notes == sorted(notes)
    assert len(notes) <= 5, "nothing was written in between, so there must be no entry"


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 7), (signal.SIGINT, 7)])
def test_a_stop_reaches_the_program_once_and_its_last_output_is_kept(box: Box, sent: signal.Signals, code: int) -> None:
    program = (
        "import signal, sys, time\n"
        "seen = []\n"
        "for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, lambda *a: seen.append(a[0]))\n"
        "print('ready', flush=True)\n"
        "while not seen: time.sleep(0.01)\n"
        "time.sleep(0.3); print('saved', len(seen), flush=True); sys.exit(7)\n"
    )
    process = box.start(sys.executable, "-c", program)
    box.until(b"ready")
    process.send_signal(sent)
    time.sleep(0.05)
    process.send_signal(sent)
    out = process.communicate(timeout=20)[0]
    assert process.returncode == code
    assert out == box.log.read_bytes() == b"ready\nsaved 1\n"


def test_a_program_without_a_handler_ends_by_the_signal(box: Box) -> None:
    process = box.start("/bin/sh", "-c", "echo ready; exec sleep 60")
    box.until(b"ready")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143


def test_python_gets_its_keyboard_interrupt(box: Box) -> None:
    """A shell ignores SIGINT in background commands; then Python would get no KeyboardInterrupt.

    busybox env cannot undo that: there SIGINT is passed on as SIGTERM.
    """
    process = box.start(sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)")
    box.until(b"ready")
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=20)[0]
    if box.shell == "busybox":
        assert process.returncode == 143
    else:
        assert b"KeyboardInterrupt" in said
        assert process.returncode == 130


def test_a_user_signal_reaches_the_program(box: Box) -> None:
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGUSR1, lambda *a: sys.exit(9))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    process = box.start(sys.executable, "-c", program)
    box.until(b"ready")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert process.returncode == 9


def test_the_time_limit_stops_the_program_and_says_so(box: Box) -> None:
    began = time.monotonic()
    code, out = box.run(
        "/bin/sh", "-c", "trap 'kill $!; echo saved; exit 0' TERM; sleep 30 & wait", env={"LAUNCHER_TIMEOUT": "1"}
    )
    assert time.monotonic() - began < 4
    assert code == 124
    assert out == box.log.read_bytes() == b"launcher: time limit of 1 s reached\nsaved\n"
    assert box.attempts[-1].startswith("exit 124 ")


def test_the_time_limit_kills_what_does_not_stop(one: Box) -> None:
    script = (one.kit / "entry.sh").read_text()
    (one.kit / "entry.sh").write_text(script.replace("our_grace=30", "our_grace=1"))
    began = time.monotonic()
    code, _ = one.run("/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.1; done", env={"LAUNCHER_TIMEOUT": "1"})
    assert code == 124
    assert time.monotonic() - began < 8


def test_the_time_limit_counts_from_the_first_start(box: Box) -> None:
    (box.output / "state").mkdir()
    (box.output / "state" / "gpu-a.attempts").write_text(f"start {int(time.time()) - 100}\nexit 1 5\n")
    code, out = box.run("/bin/sh", "-c", "echo never", env={"LAUNCHER_TIMEOUT": "60"})
    assert (code, out) == (124, b"launcher: time limit of 60 s reached\n")
    assert box.run("/bin/sh", "-c", "exit 5", env={"LAUNCHER_TIMEOUT": "3600"})[0] == 5


@pytest.mark.parametrize("limit", ["LAUNCHER_TIMEOUT", "LAUNCHER_HANG_TIMEOUT"])
def test_a_step_of_the_clock_ends_no_program(box: Box, limit: str) -> None:
    stepped, tools = box.root / "stepped", box.root / "stub"
    tools.mkdir()
    stub = f'[ ! -e {stepped} ] || exec /bin/date -d "+1 hour" "$@"\nexec /bin/date "$@"\n'
    (tools / "date").write_text(f"#!/bin/sh\n{stub}")
    (tools / "date").chmod(0o755)
    script = f"sleep 1.5; touch {stepped}; sleep 1.5"
    for _ in range(2):  # the second one is a restart
        code, out = box.run("/bin/sh", "-c", script, env={limit: "30", "PATH": f"{tools}:{box.env['PATH']}"})
        assert (code, out) == (0, b"")


def test_a_suspended_rank_is_reported_when_the_program_is_stopped(box: Box) -> None:
    process = box.start("/bin/sh", "-c", "RANK=3 sleep 60 & echo $!; wait", env={"LAUNCHER_RUN": "r"})
    deadline = time.monotonic() + 10
    while not box.log.exists() or not (text := box.log.read_text()).strip():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(int(text), signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=20)[0]
    os.kill(int(text), signal.SIGKILL)
    assert b"launcher: rank 3 does not run: its process" in out
    assert any(line.startswith("halted 3 ") for line in box.attempts)


def test_a_short_program_is_not_reported_as_timed_out(box: Box) -> None:
    assert {box.run("true", env={"LAUNCHER_TIMEOUT": "60"})[0] for _ in range(30)} == {0}


def test_no_process_or_file_of_the_script_is_left(box: Box) -> None:
    process = box.start("/bin/sh", "-c", "echo x", env={"LAUNCHER_TIMEOUT": "777"})
    process.communicate(timeout=20)
    deadline = time.monotonic() + 3  # the last of them is a `sleep 1`
    while subprocess.call(["ps", "-s", str(process.pid), "-o", "pid,args"]) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list((box.kit / "home").iterdir()) == []


def test_a_grandchild_that_holds_the_log_delays_the_end_by_only_seconds(box: Box) -> None:
    code, out = box.run("/bin/sh", "-c", f"echo before; sleep 40 2>&1 & echo $! > {box.root}/pid; exit 4")
    assert code == 4
    assert out == b"before\n"
    os.kill(
        int((box.root / "pid").read_text()), signal.SIGKILL
    )  # the pid is still valid: its parent has not waited for it


SECRETS = {
    "PLAIN": b"abc",
    "LINES": b"one\ntwo\n\n",
    "QUOTES": b"a'b\"c`id`$(id)${HOME}\\n\\",
    "EMPTY": b"",
    "SPACES": b"  lead and trail  \t",
    "BYTES": b"\xff\xc3\x28\xe2\x82",
    "OPTION": b"-n",
}


def test_secrets_arrive_byte_for_byte_and_are_never_printed(box: Box) -> None:
    for name, value in SECRETS.items():
        box.secret(name, value)
    program = (
        f"import os, sys; want = {SECRETS!r}\n"
        "sys.exit([n for n, v in want.items() if os.environb.get(n.encode()) != v] or 0)"
    )
    code, out = box.run(sys.executable, "-c", program)
    assert (code, out) == (0, b"")


@pytest.mark.parametrize("name", ["A-B", "1A", "A B", "a=b"])
def test_a_secret_that_cannot_be_a_variable_is_refused(one: Box, name: str) -> None:
    one.secret(name, b"hush")
    code, out = one.run("true")
    assert code == 73
    assert name.encode() in out
    assert b"hush" not in out


def test_the_jobs_own_variables_are_not_overwritten(box: Box) -> None:
    own = {"log": "1", "code": "2", "name": "3", "kit": "4", "child": "5", "USER": "me", "TORCH_HOME": "/t"}
    out = box.run("env", env=own)[1].decode().splitlines()
    assert {f"{name}={value}" for name, value in own.items()} <= set(out)


def test_only_documented_variables_are_added(box: Box) -> None:
    out = box.run("env")[1].decode().splitlines()
    added = {line.partition("=")[0] for line in out} - set(box.env) - {"PWD", "OLDPWD", "SHLVL", "_"}
    assert added == {
        *("USER", "LOGNAME", "XDG_CACHE_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
        *("MPLCONFIGDIR", "LAUNCHER_JOB", "LAUNCHER_ENTRY"),  # the job of the processes, and the pid to ask for stacks
    }


needs_root = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")


def _own(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def _as_stranger(argv: list[str]) -> list[str]:
    return [shutil.which("setpriv") or "", "--reuid", str(STRANGER), "--regid", str(STRANGER), "--clear-groups", *argv]


@pytest.fixture
def open_box(box: Box) -> Iterator[Box]:
    """A box that the stranger can reach: pytest makes its own folder private at the start of every session."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Box(Path(folder), box.shell)


@needs_root
@pytest.mark.parametrize("home", ["/", "/nonexistent", None])
def test_a_uid_unknown_to_the_image_gets_a_home_name_and_caches(open_box: Box, home: str | None) -> None:
    box = open_box
    _own(box.kit)
    _own(box.output)
    env = {k: v for k, v in box.env.items() if k != "HOME"} | ({"HOME": home} if home else {})
    program = (
        "import getpass, os, pathlib\n"
        "print(getpass.getuser())\n"
        "for n in 'HOME TORCH_HOME TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR XDG_CACHE_HOME MPLCONFIGDIR'.split():\n"
        "    p = pathlib.Path(os.environ[n], 'x'); p.mkdir(parents=True); p.rmdir()\n"
        "print(os.environ['HOME'])\n"
    )
    argv = _as_stranger(box.argv("/usr/bin/python3", "-c", program))
    done = subprocess.run(argv, env=env, check=False, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"uid{STRANGER}\n{box.kit}/home\n", "")
    assert box.log.stat().st_uid == STRANGER


@needs_root
def test_an_unwritable_output_folder_is_one_clear_line(open_box: Box) -> None:
    box = open_box
    _own(box.kit)
    argv = _as_stranger(box.argv("echo", "never"))
    done = subprocess.run(argv, env=box.env, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 73
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert str(box.output) in done.stderr
    assert str(STRANGER) in done.stderr


@needs_root
def test_secrets_owned_by_another_user_are_an_error(open_box: Box) -> None:
    box = open_box
    _own(box.kit)
    _own(box.output)
    box.secret("TOKEN", b"hush")
    done = subprocess.run(
        _as_stranger(box.argv("true")), env=box.env, check=False, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 73
    assert "secrets" in done.stderr


@needs_root
def test_a_full_disk_does_not_hang_the_job(box: Box) -> None:
    if subprocess.call(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(box.output)]):
        pytest.skip("mount is not allowed here")
    try:
        code, out = box.run(sys.executable, "-c", "print('x' * 1000_000); print('end')")
        assert code == 0
        assert out.count(b"x") >= 1000_000
        assert b"\nend\n" in out
    finally:
        subprocess.run(["umount", "-l", str(box.output)], check=True)


def test_the_log_is_complete_without_a_reader_of_dockers_output(box: Box) -> None:
    process = box.start("/bin/sh", "-c", "echo one; sleep 0.5; echo two; echo three")
    assert process.stdout is not None
    box.until(b"one")
    process.stdout.close()
    assert process.wait(timeout=20) == 0
    assert box.log.read_bytes() == b"one\ntwo\nthree\n"


def test_signals_at_any_time_cause_no_hang_and_no_wrong_exit_code(one: Box) -> None:
    """SIGTERM at random moments: the script ends soon, by SIGTERM or with the program's exit code."""
    codes = set()
    for step in range(40):
        process = one.start("/bin/sh", "-c", "echo x; exit 6")
        timer = threading.Timer(step / 40 * 0.04, process.terminate)
        timer.start()
        process.communicate(timeout=10)
        timer.join()
        codes.add(process.returncode)
    assert codes <= {6, 143, -15}
