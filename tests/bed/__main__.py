"""`python -m tests.bed up|down|status|env`: the bed from the command line."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.bed import cluster
from tests.bed.bed import Bed
from tests.bed.settings import BedUnavailable, Settings
from tests.bed.shell import CommandFailed


def main() -> int:
    """Returns 0: done; 1: a command failed; 3: this machine cannot run the bed (one line says why)."""
    parser = argparse.ArgumentParser(prog="python -m tests.bed", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="bring the bed up, reusing what is there")
    up.add_argument("--venv", type=Path, help="virtual environment to mount at /opt/venv (default: the running one)")
    up.add_argument("-n", "--nodes", type=int, default=2)
    down = commands.add_parser("down", help="remove nodes, network, volumes, keys")
    down.add_argument("--stop-engine", action="store_true", help="also stop the dockerd that `up` started, if now idle")
    down.add_argument("--purge", action="store_true", help="also remove images and cached files")
    commands.add_parser("status", help="show the nodes and what is left over on them")
    commands.add_parser("env", help="print shell lines that point ssh and the launcher at the bed")
    call = parser.parse_args()
    settings = Settings.from_environment(call.venv if call.command == "up" else None)
    try:
        if call.command == "up":
            began = time.monotonic()

            def say(line: str) -> None:
                print(f"{time.monotonic() - began:6.1f} s  {line}", flush=True)

            indices = cluster.up(settings, call.nodes, say=say)
            say(f"{settings.name} is up, {len(indices)} nodes: ssh -F {settings.state}/ssh_config node1")
        elif call.command == "down":
            cluster.down(settings, purge=call.purge, stop_engine=call.stop_engine)
        elif call.command == "status":
            _status(Bed.attach(settings))
        else:
            bed = Bed.attach(settings)
            print(f"export LAUNCHER_BED_DIR={settings.state}\nexport LAUNCHER_SSH_CONFIG={bed.ssh_config}")
    except BedUnavailable as error:
        print(error, file=sys.stderr)
        return 3
    except CommandFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _status(bed: Bed) -> None:
    for node in bed.nodes:
        state = bed.state(node)
        print(f"{node.alias}  {node.address}  {state}")
        if state == "running":
            for line in bed.leftovers(node).lines():
                print(f"    left over: {line}")


if __name__ == "__main__":
    sys.exit(main())
