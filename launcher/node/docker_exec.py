"""Commands inside a running Docker container, attached to the caller's terminal or pipes.

`docker exec` leaves the command running when its client exits, and forwards no signals. So each such command has a
token in its environment, by which a second command on the node finds and signals it, even after the caller has exited.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from launcher.model.forward import Forward
from launcher.node.machine import Machine, kill_on_disconnect, shell

MARK = "LAUNCHER_EXEC"
_OUTPUT_CLOSED = (141, 255)  # exit codes of docker and ssh when the reader of their output has closed it
# Runs in the container, with POSIX tools only. $1: the token, $2: the signal.
_SIGNAL = (
    "for p in /proc/[0-9]*; do "
    'tr "\\0" "\\n" <"$p/environ" 2>/dev/null | grep -qx "' + MARK + '=$1" && kill -s "$2" "${p#/proc/}"; '
    "done"
)
# Runs on the node. $1: the container, $2: the token, $3: the script above. Each line of stdin is a signal to send.
_SIGNALLER = """
exec >/dev/null 2>&1
send() { docker exec "$1" sh -c "$3" sh "$2" "$4"; }
while read -r word; do
  [ "$word" = done ] && exit
  send "$1" "$2" "$3" "$word"
done
send "$1" "$2" "$3" HUP
"""
# Runs on the node. $1: the container to remove when stdin ends without a `done`. The engine may still be creating it:
# it completes a request even if the client has disconnected.
_GUARD = """
exec >/dev/null 2>&1
while read -r word; do [ "$word" = done ] && exit; done
for try in 1 2 3 4 5 6 7 8 9 10; do
  docker container inspect "$1" && docker rm -f -v "$1" && exit
  sleep 1
done
"""


def run(machine: Machine, container: str, argv: Sequence[str], *, terminal: bool, ports: Sequence[Forward] = ()) -> int:
    """Run a command in the container and return its exit code, 126 or 127 if it could not be started.

    Ctrl-C reaches it as a key of its terminal, or as SIGINT if it has no terminal. If the caller is killed or the
    connection is lost, the command gets SIGHUP. Raises NodeUnreachable.
    """
    token = secrets.token_hex(8)
    options = ["--interactive", "--env", f"{MARK}={token}"]
    if terminal:
        options += ["--tty", "--env", f"TERM={os.environ.get('TERM', 'xterm')}"]
    command = ["docker", "exec", *options, container, *argv]
    with kill_on_disconnect(machine, shell(_SIGNALLER, container, token, _SIGNAL)) as send:
        code = machine.interact(command, terminal=terminal, interrupt=lambda: send("INT"), ports=ports)
        if code in _OUTPUT_CLOSED:
            send("HUP")
        return code


def guard(machine: Machine, container: str) -> AbstractContextManager[Callable[[str], None]]:
    """Return a context in which the container is removed if this process exits. Raises NodeUnreachable."""
    return kill_on_disconnect(machine, shell(_GUARD, container))
