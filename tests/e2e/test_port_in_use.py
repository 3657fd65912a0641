"""A rendezvous port that another run uses: it is named before anything is prepared, and `--wait` waits for it."""

from __future__ import annotations

import socket

from tests.e2e.cli import Cli
from tests.ports import free_port

LISTENS = """\
import os, socket, time
if os.environ["RANK"] == "0":
    open_ = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    print("listens", flush=True)
    time.sleep(600)
"""


def test_a_run_that_uses_the_port_is_named_and_waited_for(home_cli: Cli) -> None:
    (home_cli.cwd / "listens.py").write_text(LISTENS)
    keys = {"runtime": "process", "nodes": ["local", "local"], "port": free_port()}
    home_cli("up", "-d", home_cli.job("first", run={"command": ["python3", "listens.py"]}, **keys))
    first = home_cli.runs()[-1].name
    home_cli.until_logged("listens")
    second = home_cli.job("second", run={"command": ["echo", "hello"]}, **keys)

    in_use = f"node local-0: rendezvous port {keys['port']} is in use by run {first} of "
    refused = home_cli("up", second, code=3).stderr
    assert in_use in refused
    assert f"wait for it: --wait; choose another port: --set port={keys['port'] + 1}; or stop that run: " in refused
    assert f"launcher down {first} --nodes local\n" in refused
    planned = home_cli("plan", second).stdout
    held = in_use.removeprefix("node local-0: ")
    assert held in planned
    assert "`up --wait` waits" in planned
    assert held in home_cli("doctor", second, code=3).stdout

    waits = home_cli.start("up", "--wait", second)
    assert waits.stderr is not None
    assert any(f"waiting: {in_use}" in line for line in waits.stderr)  # stops at the first
    home_cli("down", first)
    assert waits.communicate(timeout=60)[0].count("hello") == 1
    assert waits.returncode == 0


def test_a_program_that_is_no_run(home_cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        job = home_cli.job("job", runtime="process", nodes=["local"], run={"command": ["true"]}, port=port)
        refused = home_cli("up", job, code=3).stderr
    assert f"port {port} is in use, and no run that is visible here claims it\n  -> stop" in refused
