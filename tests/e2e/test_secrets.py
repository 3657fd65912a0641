"""A secret exists only in the file that the job's processes read: all other locations are searched for its value."""

from __future__ import annotations

import gzip
import json
import secrets
import stat
from pathlib import Path

import pytest

from tests.bed.bed import Bed, Node
from tests.e2e.cli import Cli, bed_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]

# The program has both secrets, passes them to a child process, and prints neither.
PROGRAM = """
import subprocess, sys, time
child = "import os; print(len(os.environ['TOKEN'] + os.environ['FROM_FILE']))"
print("has", subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.strip(), flush=True)
time.sleep(600)
"""
EVERYWHERE = "/home /root /tmp /var/tmp /dev/shm /run /var/log /var/lib/docker /etc"


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    """They are searched too."""
    return tmp_path / "cache"


def on_disk(bed: Bed, node: Node, *values: str) -> dict[str, set[str]]:
    """Return the files of the node that contain each value."""
    script = f"grep -roaF {' '.join(f'-e {value}' for value in values)} {EVERYWHERE} 2>/dev/null || true"
    found = [line.rpartition(":") for line in bed.sh(node, script, timeout=200).splitlines()]
    return {value: {path for path, _, each in found if each == value} for value in values}


def command_lines(bed: Bed, node: Node) -> str:
    return bed.sh(node, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")


def ours() -> str:
    """Return the command lines of all processes on this machine, including the launcher."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:  # the process has exited
            continue
    return b"\n".join(found).decode(errors="replace")


def below(folder: Path) -> list[tuple[str, bytes]]:
    """Return every file with its content, archives unpacked."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    contents = [(str(path), path.read_bytes()) for path in files]
    return [(name, gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data) for name, data in contents]


def test_a_secret_exists_only_in_its_file(bed_cli: Cli, bed: Bed, tmp_path: Path) -> None:
    token, second = secrets.token_hex(12), secrets.token_hex(12)
    (bed_cli.cwd / "secret.txt").write_text(second + "\n")
    (bed_cli.cwd / "secret.txt").chmod(0o600)
    (bed_cli.cwd / ".gitignore").write_text("secret.txt\n")
    (bed_cli.cwd / "holds.py").write_text(PROGRAM)
    cli = Cli(bed_cli.cwd, {**bed_cli.env, "TOKEN": token})
    keys = bed_job(run={"command": ["python3", "holds.py"]}, secrets=["TOKEN", {"FROM_FILE": "secret.txt"}])
    job = cli.job("holds", **keys)

    outputs = [cli("plan", job, "--json").stdout]
    process = cli.start("up", job)
    lines_of_ours = ""
    assert process.stdout is not None
    while True:  # until the run has started
        lines_of_ours += ours()
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        if line == "has 48\n":
            break
    run = cli.runs()[-1]
    outputs += [cli(*argv).stdout for argv in (["status", "--json"], ["runs", "--json"], ["logs", "-F"])]

    searched = {node: on_disk(bed, node, token, second) for node in bed.nodes[:2]}
    for value in (token, second):
        assert value not in lines_of_ours
        assert all(value not in text for text in outputs)
        for node in bed.nodes[:2]:
            assert value not in command_lines(bed, node)
            ids = bed.docker(node, "ps", "-aq").split()
            inspected = bed.docker(node, "inspect", *ids)
            assert "launcher.run" in inspected
            assert value not in inspected
            assert value not in bed.docker(node, "logs", ids[0])
            image = json.loads(inspected)[0]["Image"]
            assert value not in bed.docker(node, "image", "inspect", image)
            assert value not in bed.docker(node, "history", "--no-trunc", image)
            held = searched[node][value]
            assert held, "the search itself does not work"
            assert all("/.launcher/secrets/" in path for path in held), held
            modes = bed.sh(node, f"stat -c '%a %U' {' '.join(held)}").splitlines()
            assert {line.split()[0] for line in modes} == {"600"}
        found = [name for name, data in [*below(run), *below(tmp_path / "cache")] if value.encode() in data]
        assert found == []

    cli("down")
    process.wait(60)
    for node in bed.nodes[:2]:
        assert on_disk(bed, node, token, second) == {token: set(), second: set()}
    for value in (token, second):
        assert [name for name, data in below(run) if value.encode() in data] == []
    assert stat.S_IMODE((cli.cwd / "secret.txt").stat().st_mode) == 0o600
    assert bed.wait_clean(bed.nodes[:2]) == []


def test_a_printed_secret_is_masked_in_output(bed_cli: Cli) -> None:
    cli = Cli(bed_cli.cwd, {**bed_cli.env, "TOKEN": secrets.token_hex(12)})
    command = ["sh", "-c", 'echo "it is $TOKEN"; echo "$TOKEN" >&2; exit 3']
    keys = bed_job(run={"command": command}, nodes=["node1"], secrets=["TOKEN"])
    shown = cli("up", cli.job("prints", **keys), code=1)
    assert "it is ***" in shown.stdout
    again = cli("logs", code=1)
    assert "it is ***" in again.stdout
    assert "not masked" not in shown.stderr + again.stderr
    for argv in (["logs", "-F"], ["fetch"]):
        assert "not masked, as their values are unknown on this machine: TOKEN" in bed_cli(*argv).stderr
    assert all(cli.env["TOKEN"] not in text for text in (shown.stdout, shown.stderr, again.stdout, again.stderr))
