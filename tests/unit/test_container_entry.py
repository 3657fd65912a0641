"""The entry script in all common shells: execution, logs and exit codes."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.unit.container_box import Box, needs_root


@pytest.mark.parametrize("code", [0, 1, 3, 127, 143, 255])
def test_the_exit_code_is_the_programs_own(box: Box, code: int) -> None:
    assert box.run("/bin/sh", "-c", f"exit {code}")[0] == code
    assert [line.split()[:2] for line in box.attempts][1] == ["exit", str(code)]


def test_a_program_killed_by_a_signal_gives_128_and_the_signal(box: Box) -> None:
    assert box.run("/bin/sh", "-c", "kill -9 $$")[0] == 137


def test_a_missing_program_is_reported(box: Box) -> None:
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
    noted = [re.sub(r"\d{10,}", "T", line) for line in box.attempts]
    assert noted == ["start T", "exit 1 T", "start T", "begins 10", "exit 0 T"], "of what was printed before"


def test_a_program_that_replaces_its_files_by_named_pipes_ends_and_is_not_started_again(box: Box) -> None:
    replaced = "cd $LAUNCHER_OUTPUT; for file in state/*.attempts logs/*.clock; do rm $file; mkfifo $file; done; exit 3"
    assert box.run("/bin/sh", "-c", replaced)[0] == 3
    code, out = box.run("/bin/sh", "-c", "echo again")
    assert code == 73
    assert b"is not a regular file: remove it" in out


def test_the_clock_file_records_when_bytes_were_written(box: Box) -> None:
    before = int(time.time())
    box.run("/bin/sh", "-c", "echo one; sleep 2.3; echo two")
    notes = [tuple(map(int, line.split())) for line in (box.output / "logs" / "gpu-a.clock").read_text().splitlines()]
    at_four = min(moment for moment, size in notes if size >= 4)
    at_eight = min(moment for moment, size in notes if size >= 8)
    assert before <= at_four <= before + 10
    assert 2 <= at_eight - at_four <= 10
    assert notes == sorted(notes)
    assert len(notes) <= 5, "there must be no entries while nothing is written"


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
    out = process.communicate(timeout=60)[0]
    assert process.returncode == code
    assert out == box.log.read_bytes() == b"ready\nsaved 1\n"


def test_a_program_without_a_handler_ends_by_the_signal(box: Box) -> None:
    process = box.start("/bin/sh", "-c", "echo ready; exec sleep 60")
    box.until(b"ready")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_python_gets_its_keyboard_interrupt(box: Box) -> None:
    """A shell ignores SIGINT in background commands; then Python would get no KeyboardInterrupt.

    env of busybox cannot undo that: there SIGINT is forwarded as SIGTERM.
    """
    process = box.start(sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)")
    box.until(b"ready")
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=60)[0]
    if box.shell == "busybox":
        assert process.returncode == 143
    else:
        assert b"KeyboardInterrupt" in out
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
    process.communicate(timeout=60)
    assert process.returncode == 9


def test_the_time_limit_stops_the_program_and_is_reported(box: Box) -> None:
    ready = box.root / "ready"  # its limit is over once the program has its trap
    box.change(
        '        if [ -n "$our_deadline" ] && [ "$(seconds)" -ge "$our_deadline" ]', f"        if [ -e '{ready}' ]"
    )
    program = f"trap 'kill $!; echo saved; exit 0' TERM; sleep 600 & : >'{ready}'; wait"
    code, out = box.run("/bin/sh", "-c", program, env={"LAUNCHER_TIMEOUT": "60"})
    assert code == 124
    assert out == box.log.read_bytes() == b"launcher: time limit of 60 s reached\nsaved\n"
    assert box.attempts[-1].startswith("exit 124 ")


def test_the_time_limit_kills_a_program_that_does_not_stop(one: Box) -> None:
    one.change("our_grace=45", "our_grace=1")
    ready = one.root / "ready"  # its limit is over once the program ignores the signal
    one.change(
        '        if [ -n "$our_deadline" ] && [ "$(seconds)" -ge "$our_deadline" ]', f"        if [ -e '{ready}' ]"
    )
    program = f"trap '' TERM; : >'{ready}'; while :; do sleep 0.1; done"
    code, _ = one.run("/bin/sh", "-c", program, env={"LAUNCHER_TIMEOUT": "60"})
    assert code == 124
    assert b"did not exit within 1 s of SIGTERM and was killed" in one.log.read_bytes()


def test_the_time_limit_counts_from_the_first_start(box: Box) -> None:
    (box.output / "state").mkdir()
    (box.output / "state" / "gpu-a.attempts").write_text(f"start {int(time.time()) - 100}\nexit 1 5\n")
    code, out = box.run("/bin/sh", "-c", "echo never", env={"LAUNCHER_TIMEOUT": "60"})
    assert (code, out) == (124, b"launcher: time limit of 60 s reached\n")
    assert box.run("/bin/sh", "-c", "exit 5", env={"LAUNCHER_TIMEOUT": "3600"})[0] == 5


def test_a_clock_adjustment_stops_no_program(box: Box) -> None:
    stepped, tools = box.root / "stepped", box.root / "stub"
    tools.mkdir()
    stub = f'[ ! -e {stepped} ] || exec /bin/date -d "+1 hour" "$@"\nexec /bin/date "$@"\n'
    (tools / "date").write_text(f"#!/bin/sh\n{stub}")
    (tools / "date").chmod(0o755)
    limits = {"LAUNCHER_TIMEOUT": "120", "LAUNCHER_HANG_TIMEOUT": "120"}
    script = f"sleep 0.4; touch {stepped}; sleep 1.2"  # the limits are checked every second
    for _ in range(2):  # the second one is a restart
        code, out = box.run("/bin/sh", "-c", script, env={**limits, "PATH": f"{tools}:{box.env['PATH']}"})
        assert (code, out) == (0, b"")


def test_a_suspended_rank_is_reported_when_the_program_is_stopped(box: Box) -> None:
    rank = f"RANK=3 sh -c 'touch {STARTED}; exec sleep 60' {SILENT} & until [ -e {STARTED} ]; do sleep 0.1; done"
    process = box.start("/bin/sh", "-c", f"{rank}; echo $!; wait")
    deadline = time.monotonic() + 60
    while not box.log.exists() or not (text := box.log.read_text()).strip():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(int(text), signal.SIGSTOP)
    while " T " not in Path(f"/proc/{int(text)}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=60)[0]
    os.kill(int(text), signal.SIGKILL)
    assert b"launcher: rank 3 is not running: its process" in out
    assert any(line.startswith("halted 3 ") for line in box.attempts)


def test_ranks_write_their_recordings_before_they_are_stopped(box: Box) -> None:
    pipes = box.kit / "home" / ".flight_recorder"
    rank = f"mkdir {pipes}; mkfifo {pipes}/rank-0; echo ready; read -r _ <>{pipes}/rank-0; sleep 0.5; rm {pipes}/rank-0"
    process = box.start("/bin/sh", "-c", f"{rank}; echo written; sleep 60 & echo $!; wait")
    box.until(b"ready")
    process.send_signal(signal.SIGQUIT)  # its stack is printed afterwards
    box.until(b"written")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=50)


SILENT = ">/dev/null 2>&1"  # does not keep the log open, for whose end the script waits
LOGGED = "echo 1 >>$LAUNCHER_OUTPUT/logs/rank-3.log;"
STARTED = "$LAUNCHER_OUTPUT/started"  # before that, the process has no variable RANK
RUNS = f"{LOGGED} RANK=3 sh -c 'touch {STARTED}; exec sleep 15' {SILENT} & until [ -e {STARTED} ]; do sleep 0.1; done"


@pytest.mark.parametrize(("rank", "left"), [(RUNS, False), (LOGGED, True), ("true", False)])
def test_stopping_a_program_whose_ranks_had_exited_is_recorded(box: Box, rank: str, left: bool) -> None:
    process = box.start("/bin/sh", "-c", f"{rank}\necho ready; exec sleep 60")
    box.until(b"ready")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert any(line.startswith("left ") for line in box.attempts) is left


def test_a_node_without_expected_output_is_not_considered_hung(one: Box) -> None:
    """Until another node is lost, or rank 0 moves to it (elastic.py)."""
    one.change("our_patience=15", "our_patience=1")
    quiet = one.kit / "home" / "quiet"
    waits = f"touch {quiet}; sleep 4; echo begins; rm {quiet}; exec sleep 60"
    code, out = one.run("/bin/sh", "-c", waits, env={"LAUNCHER_HANG_TIMEOUT": "2"})
    assert code == 125
    assert b"begins\nlauncher: no output and no step for 2 s" in out


def test_a_program_that_ignores_a_hang_is_killed_soon(one: Box) -> None:
    """Not after the hang timeout again, though the hang itself was reported in the log."""
    one.change("our_patience=15", "our_patience=1")
    one.change("our_silence=$LAUNCHER_HANG_TIMEOUT", "our_silence=1")
    code, out = one.run("sleep", "600", env={"LAUNCHER_HANG_TIMEOUT": "3600"})
    assert code == 125
    assert b"no output and no step for 3600 s" in out


@pytest.mark.parametrize("limit", [True, False])
def test_a_program_that_was_told_to_end_may_save_without_output(one: Box, limit: bool) -> None:
    """At the time limit, or by SIGTERM: silence is no hang then."""
    ready = one.root / "ready"
    if limit:
        one.change(
            '        if [ -n "$our_deadline" ] && [ "$(seconds)" -ge "$our_deadline" ]', f"        if [ -e '{ready}' ]"
        )
    program = f"trap 'sleep 5; echo saved; exit 7' TERM; echo ready; : >'{ready}'; while :; do sleep 0.1; done"
    process = one.start("/bin/sh", "-c", program, env={"LAUNCHER_HANG_TIMEOUT": "2", "LAUNCHER_TIMEOUT": "60"})
    if not limit:
        one.until(b"ready")
        process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == (124 if limit else 7)
    assert b"saved\n" in out
    assert b"no output" not in out


def test_a_program_that_is_being_stopped_does_not_reach_its_time_limit(one: Box) -> None:
    """Of two nodes, the one that failed would not be the first failure."""
    ready = one.root / "ready"
    one.change(
        '        if [ -n "$our_deadline" ] && [ "$(seconds)" -ge "$our_deadline" ]', f"        if [ -e '{ready}' ]"
    )
    program = f"trap ': >{ready}; sleep 3; exit 7' TERM; echo ready; while :; do sleep 0.1; done"
    process = one.start("/bin/sh", "-c", program, env={"LAUNCHER_TIMEOUT": "60"})
    one.until(b"ready")
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=60)[0]
    assert (process.returncode, out) == (7, b"ready\n")


def test_a_short_program_is_not_reported_as_timed_out(box: Box) -> None:
    assert {box.run("true", env={"LAUNCHER_TIMEOUT": "60"})[0] for _ in range(30)} == {0}


def test_the_script_leaves_no_processes_or_files(box: Box) -> None:
    process = box.start("/bin/sh", "-c", "echo x", env={"LAUNCHER_TIMEOUT": "777"})
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60  # the last of them is a `sleep 1`
    while subprocess.call(["ps", "-s", str(process.pid), "-o", "pid,args"]) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list((box.kit / "home").iterdir()) == []


def test_an_orphan_that_keeps_the_log_open_delays_the_exit_by_only_seconds(box: Box) -> None:
    code, out = box.run("/bin/sh", "-c", f"echo before; sleep 40 2>&1 & echo $! > {box.root}/pid; exit 4")
    assert code == 4
    assert out == b"before\n"
    os.kill(
        int((box.root / "pid").read_text()), signal.SIGKILL
    )  # the pid is still valid: its parent has not waited for it
    _, exited = box.attempts
    noted = (box.output / "state/gpu-a.attempts").stat().st_mtime
    assert noted - int(exited.split()[2]) > 1.5  # the moment at which the program ended, not its orphan


def test_all_that_was_printed_is_in_the_log_although_nobody_reads_it(box: Box) -> None:
    """The container's engine is away: it was killed, or is replaced by a newer one."""
    ours, theirs = os.pipe()
    try:
        os.set_blocking(theirs, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(theirs, bytes(4096))
        os.set_blocking(theirs, True)
        program = "for number in range(1000): print(number, 'x' * 30)"
        argv, env = box.argv(sys.executable, "-c", program), box.env
        assert subprocess.call(argv, env=env, stdout=theirs, stderr=theirs, timeout=60) == 0
    finally:
        os.close(theirs)
        os.close(ours)
    assert [line.split()[0] for line in box.log.read_text().splitlines()] == [str(number) for number in range(1000)]
    assert [line.split()[:2] for line in box.attempts][-1] == ["exit", "0"]


@pytest.mark.parametrize("where", ["memory.events", "memory/memory.oom_control"])  # cgroups v2 and v1
@pytest.mark.parametrize("kills", [0, 1])
def test_a_process_that_the_kernel_killed_for_memory_is_recorded(box: Box, where: str, kills: int) -> None:
    counted = box.root / "cgroup" / where
    counted.parent.mkdir(parents=True)
    counted.write_text("low 0\noom 7\noom_kill 2\n")
    box.change("our_cgroup=/sys/fs/cgroup", f"our_cgroup={box.root}/cgroup")
    box.run("/bin/sh", "-c", f"printf 'low 0\\noom 8\\noom_kill {2 + kills}\\n' >{counted}; exit 1")
    assert [line.split()[0] for line in box.attempts] == ["start", *["oom"] * kills, "exit"]


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


@needs_root
def test_a_full_disk_at_a_restart_is_named(box: Box) -> None:
    if subprocess.call(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(box.output)]):
        pytest.skip("mount is not allowed here")
    try:
        assert box.run("/bin/sh", "-c", "yes >>$LAUNCHER_OUTPUT/full")[0] == 1
        (box.output / "state/gpu-a.attempts").write_text("")  # as where its last line has filled a block
        subprocess.call(["sh", "-c", f"yes >>'{box.output}/full'"], stderr=subprocess.DEVNULL)
        code, out = box.run("true")
    finally:
        subprocess.run(["umount", "-l", str(box.output)], check=True)
    assert code == 73
    assert b"the output folder's disk is full: free some space in " in out


@needs_root
def test_a_disk_without_inodes_is_told_from_a_full_one(box: Box) -> None:
    if subprocess.call(["mount", "-t", "tmpfs", "-o", "nr_inodes=2", "tmpfs", str(box.output)]):
        pytest.skip("mount is not allowed here")
    try:
        code, out = box.run("true")
    finally:
        subprocess.run(["umount", "-l", str(box.output)], check=True)
    assert code == 73
    assert b"the output folder's disk has no inodes left: remove files in " in out


HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.mark.parametrize(("soft", "hard", "wanted"), [(256, HARD, min(HARD, 65536)), (256, 512, 512), (512, 512, 512)])
def test_the_limit_of_open_files_is_raised(box: Box, soft: int, hard: int, wanted: int) -> None:
    limits = [f"{shutil.which('prlimit')}", f"--nofile={soft}:{hard}", *box.argv("sh", "-c", "ulimit -Sn; ulimit -Hn")]
    done = subprocess.run(limits, env=box.env, capture_output=True, check=True)
    assert done.stdout.split() == [str(wanted).encode(), str(hard).encode()]


def test_the_log_is_complete_if_stdout_is_closed(box: Box) -> None:
    process = box.start("/bin/sh", "-c", "echo one; sleep 0.5; echo two; echo three")
    assert process.stdout is not None
    box.until(b"one")
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert box.log.read_bytes() == b"one\ntwo\nthree\n"


def test_signals_at_any_time_cause_no_hang_and_no_wrong_exit_code(one: Box) -> None:
    """SIGTERM at random moments: the script exits soon, by SIGTERM or with the program's exit code."""
    codes = set()
    for step in range(40):
        process = one.start("/bin/sh", "-c", "echo x; exit 6")
        timer = threading.Timer(step / 40 * 0.04, process.terminate)
        timer.start()
        process.communicate(timeout=60)
        timer.join()
        codes.add(process.returncode)
    assert codes <= {6, 143, -15}
