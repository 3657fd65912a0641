"""Misbehaving programs, nodes and local disks: every command still finishes and never passes terminal sequences."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import ROOT, Cli, bed_job, small_disk
from tests.e2e.terminal import Person

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]

# Files that should not be in an output folder: unreadable, nested too deeply, too large, or with too long a name
NASTY = r"""
cd /output && mkdir -p errors tensorboard/locked
echo x >errors/unreadable.json && chmod 000 errors/unreadable.json
echo x >tensorboard/locked/x && chmod 000 tensorboard/locked
head -c 300000 /dev/zero | tr '\0' '[' >errors/node1.json
cp errors/node1.json metrics.jsonl && echo >>metrics.jsonl && echo '{"kind": "epoch", "val": []}' >>metrics.jsonl
truncate -s 200G tensorboard/events.out.tfevents.1
echo kept >tensorboard/events.out.tfevents.2
echo x >"errors/$(head -c 248 /dev/zero | tr '\0' e).json"
echo ready
"""
# Prints a secret in two parts, and JSON-encoded
LEAKS = r"""
for i in 1 2 3; do printf 'it is hunter2-"quo'; sleep 0.5; printf '%s\n' "ted\"-and-long, $TOKEN."; done
printf '%s' '{"message": {"message": "hunter2-\"quoted\"-and-long"}}' >/output/errors/node1.json
printf '%s\n' '{"kind": "epoch", "note": "hunter2-\"quoted\"-and-long"}' >/output/metrics.jsonl
echo ready
"""
SAYS = r"""
printf 'title \033]0;owned\007 \033[31mred\033[0m \033[2Jcleared \302\233H\n'
printf '\r 10%%'; sleep 2; printf '\r 90%%'; sleep 2; printf '\r100%%\n'
printf 'last \033]52;c;b3du\007words\n'
exit 3
"""


def one_node(cli: Cli, name: str, script: str, **keys: object) -> Path:
    return cli.job(name, **bed_job(run={"command": ["sh", "-c", script]}, nodes=["node1"], **keys))


def no_traceback(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    return done.stderr


def test_files_that_cannot_be_downloaded_cause_warnings(bed_cli: Cli, bed: Bed) -> None:
    bed_cli("up", "-d", one_node(bed_cli, "nasty", f"{NASTY} exec sleep 600"))
    bed_cli.until_logged("ready")
    run = bed_cli.runs()[-1]
    for other, plan in (("empty-20261121-120000-0001", "{}"), ("deep-20261121-120000-0002", "[" * 100_000)):
        (run.parent / other).mkdir()
        (run.parent / other / "plan.json").write_text(plan)
    assert run.name in no_traceback(bed_cli("runs")) + bed_cli("runs").stdout
    no_traceback(bed_cli("status"))
    fetched = no_traceback(bed_cli("fetch", "nasty"))
    assert "unreadable.json could not be read" in fetched
    started = time.monotonic()
    stderr = no_traceback(bed_cli("down", "--all"))
    assert time.monotonic() - started < 60
    for text in ("unreadable.json could not be read", "locked", "214,748,364,800 bytes", "limits.file", "eeee"):
        assert text in stderr
    assert (run / "tensorboard/events.out.tfevents.2").read_text() == "kept\n"
    assert bed.wait_clean(bed.nodes[:1]) == []


def test_an_attached_run_with_such_files_succeeds(bed_cli: Cli, bed: Bed) -> None:
    started = time.monotonic()
    done = bed_cli("up", one_node(bed_cli, "nasty", NASTY))
    assert time.monotonic() - started < 90
    assert "not downloaded" in no_traceback(done)
    assert bed_cli.result()["state"] == "done"
    failed = bed_cli("up", one_node(bed_cli, "fails", f"{NASTY} exit 7"), code=1)
    assert "exited with code 7" in no_traceback(failed)
    bed_cli("down", "nasty")
    assert bed.wait_clean(bed.nodes[:1]) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_local_disk_leaves_nothing_on_the_nodes(bed_cli: Cli, bed: Bed) -> None:
    chatty = "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo ready"
    with small_disk(bed_cli.cwd / "runs"):
        done = bed_cli("up", one_node(bed_cli, "full", chatty))
        assert "this machine: the disk of " in no_traceback(done)
        bed_cli("down")
        (run,) = bed_cli.runs()
        for path in (run / "logs").iterdir():
            path.unlink()
        bed_cli("up", "-d", one_node(bed_cli, "full", f"{chatty}; exec sleep 600"))
        time.sleep(3)
        stderr = no_traceback(bed_cli("down"))
        assert "this machine: the disk of " in stderr
        assert bed.wait_clean(bed.nodes[:1]) == []
        refused = bed_cli("up", one_node(bed_cli, "full", chatty), code=None)
        assert refused.returncode in (0, 3)
        no_traceback(refused)
        bed_cli("down", code=None)
    assert bed.wait_clean(bed.nodes[:1]) == []


@pytest.mark.parametrize("how", ["attached", "down"])
def test_a_secret_is_masked_in_local_files(bed_cli: Cli, bed: Bed, how: str) -> None:
    token = 'hunter2-"quoted"-and-long'
    cli = Cli(bed_cli.cwd, {**bed_cli.env, "TOKEN": token})
    (cli.cwd / "leaks.sh").write_text(LEAKS)
    if how == "attached":
        cli("up", one_node(cli, "leaks", ". ./leaks.sh; exit 3", secrets=["TOKEN"]), code=1)
        assert "failure" in cli.result()
    else:
        cli("up", "-d", one_node(cli, "leaks", ". ./leaks.sh; exec sleep 600", secrets=["TOKEN"]))
        cli.until_logged("ready")
        cli("down")
    run = cli.runs()[-1]
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert [path for path, data in files.items() if token.encode() in data or b"quoted" in data] == []
    log = files[run / "logs" / "node1.log"]
    assert log.count(b"it is " + b"*" * len(token) + b", " + b"*" * len(token) + b".\n") == 3
    there = f"/home/trainer/.launcher/{run.name}/logs/node1.log"
    assert len(log) == int(bed.sh(bed.nodes[0], f"stat -c %s {there}"))
    assert json.loads(files[run / "metrics.jsonl"])["kind"] == "epoch"
    assert {stat.S_IMODE(path.stat().st_mode) for path in (run.parent, run)} == {0o700}


def test_terminal_sequences_are_filtered(bed_cli: Cli) -> None:
    process = bed_cli.start("up", one_node(bed_cli, "says", SAYS))
    assert process.stdout is not None
    seen = [process.stdout.readline(), process.stdout.readline()]
    assert process.poll() is None, "the states of a progress bar are shown when the run has ended"
    rest, err = process.communicate(timeout=60)
    assert seen[0] == "title  \x1b[31mred\x1b[0m cleared \n"
    assert seen[1] == " 10%\n"
    assert [line for line in rest.splitlines() if "%" in line][-1] == "100%"
    assert "last words" in rest
    shown = [rest, err, bed_cli("logs", code=1).stdout, bed_cli("status").stdout, bed_cli("runs").stdout]
    for text in shown:
        assert "\x1b]" not in text
        assert "\x1b[2J" not in text
    assert "\x1b" not in err
    assert "\x1b]0;owned\x07" in bed_cli("logs", "--raw", code=1).stdout


def test_a_progress_bar_is_shown_on_a_terminal_while_it_moves(bed_cli: Cli) -> None:
    bar = "i=0; while [ $i -lt 4 ]; do i=$((i+1)); printf '\\r epoch %s0%%' $i; sleep 1; done; echo; echo over"
    person = Person(bed_cli, "up", one_node(bed_cli, "bar", bar))
    for state in ("epoch 20%", "epoch 30%"):
        person.sees(state)
        assert "over" not in person.seen
    person.sees("over")
    assert person.end() == 0


def peak_memory(cli: Cli, *args: str) -> tuple[int, int, str]:
    """Return exit code, peak memory in MiB and stderr of the launcher."""
    watch = "import resource, subprocess, sys\n"
    watch += "code = subprocess.run([sys.executable, '-m', 'launcher', *sys.argv[1:]]).returncode\n"
    watch += "print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)"
    done = subprocess.run(
        [sys.executable, "-c", watch, *args],
        cwd=cli.cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **cli.env},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    code, mebibytes = done.stdout.split()[-2:]
    return int(code), int(mebibytes), done.stderr


def test_an_endless_answer_is_cut_off(bed_cli: Cli, bed: Bed) -> None:
    """The node's login shell prints endlessly before it runs any command except the engine's."""
    rc = "/home/trainer/.bashrc"
    floods = 'case "$BASH_EXECUTION_STRING" in *dial-stdio*) ;; *) yes ;; esac'
    bed.sh(bed.nodes[0], f"cp -p {rc} {rc}.kept 2>/dev/null; echo '{floods}' >{rc}; chmod a+r {rc}")
    try:
        started = time.monotonic()
        code, used, stderr = peak_memory(bed_cli, "plan", str(one_node(bed_cli, "any", "true")))
        print(f"exit {code} after {time.monotonic() - started:.1f} s with {used} MiB: {stderr}")
    finally:
        bed.sh(bed.nodes[0], f"mv -f {rc}.kept {rc} 2>/dev/null || rm -f {rc}")
    assert time.monotonic() - started < 90
    assert code == 3
    assert used < 400
    assert "printed over 64 MiB" in stderr
    assert "Traceback" not in stderr
