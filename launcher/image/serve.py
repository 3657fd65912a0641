"""A node that has an image serves it to its neighbours: images/pack.py in a container of that image, and its clients.

Nothing is installed: the image's own Python reads the engine's store, and a neighbour takes the archive with bash and
`docker load`. Each side proves to the other that it knows the token, which is made for this one occasion and is on no
command line; what is served travels as it is, like everything that the ranks tell one another.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import secrets
import shlex
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.errors import ImageShipFailed, LauncherError
from launcher.image.export import STORE_COMMAND, packing, parse_store, seeing
from launcher.model.facts import Reach
from launcher.node.engine import Engine

TOKEN_FILE = "launcher-token"  # noqa: S105 - its place in the server's container
START_TIMEOUT = 30.0
WAY_TIMEOUT = 3.0
TAKE_TIMEOUT = 4 * 3600.0  # seconds for one archive
TAKEN = "launcher: taken"
_PORT = re.compile(rb"^PORT (\d+)$", re.MULTILINE)
# On the node that takes. $1, $2: address and port, $3: how the server greets, $4: KNOWN, $5: CHUNK; stdin: the token
_TAKE = f"""
exec 3<>"/dev/tcp/$1/$2" || exit
IFS= read -r -t 30 hello <&3
[ "$hello" = "$3" ] || {{ echo "somebody else answers at $1 port $2"; exit; }}
IFS= read -r token
printf "%s %s %s\\n" "$token" "$4" "$5" >&3
docker load --quiet <&3 && echo "{TAKEN}"
"""


@dataclass(frozen=True)
class Server:
    """A node that serves, and where."""

    engine: Engine
    addresses: Sequence[str]  # best first
    port: int
    token: str

    @property
    def greeting(self) -> str:
        return hashlib.sha256(f"launcher {self.token}".encode()).hexdigest()


@contextlib.contextmanager
def serving(engine: Engine, image: str, addresses: Sequence[str]) -> Iterator[Server]:
    """While this is held the node serves `image` (an id of its classic store). Raises LauncherError where it cannot."""
    store = parse_store(engine.sh(shlex.join(STORE_COMMAND)).decode(errors="replace"))
    if store is None:
        raise ImageShipFailed(engine.node, "keeps its images in a way that cannot be read layer by layer")
    name, token = f"launcher-serve-{secrets.token_hex(6)}", secrets.token_hex(32)
    argv = ["docker", "create", "--name", name, "--network", "host", *seeing(store), image]
    create = shlex.join([*argv, *packing(image, "serve", f"/{TOKEN_FILE}")])
    try:
        with engine.guard(name):
            said = engine.sh(f"{create} 2>&1")
            if not re.fullmatch(rb"[0-9a-f]{64}", said.strip().splitlines()[-1] if said.strip() else b""):
                raise ImageShipFailed(
                    engine.node, f"no container to serve from: {said[-300:].decode(errors='replace')}"
                )
            engine.put(name, _archive(token))
            engine.start(name)
            yield Server(engine, addresses, _port(engine, name), token)
    finally:
        with contextlib.suppress(LauncherError):  # without a way to the node, its guard there removes the container
            engine.sh('docker rm -f -v "$1" 2>&1', name)


def way(client: Engine, server: Server) -> str | None:
    """The first of the server's addresses that this node reaches; None where there is none, or we may not try."""
    ways = (ip for ip in server.addresses if client.reach(ip, server.port, WAY_TIMEOUT) is Reach.OPEN)
    return next(ways, None)


def take(client: Engine, server: Server, address: str, known: int, chunk: int) -> None:
    """One archive from the server into this node's store: layers from `known` on. Raises ImageShipFailed."""
    # sh reads this from its standard input, so the token is on no command line
    script = f"exec bash -c {shlex.quote(_TAKE)} bash \"$@\" 2>&1 <<'END'\n{server.token}\nEND\n"
    arguments = (address, str(server.port), server.greeting, str(known), str(chunk))
    said = client.sh(script, *arguments, timeout=TAKE_TIMEOUT).decode(errors="replace").strip()
    if not said.endswith(TAKEN):
        words = said[-300:] or "the connection broke off"
        raise ImageShipFailed(client.node, f"did not get it from {server.engine.node}: {words}")


def _archive(token: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo(TOKEN_FILE)
        member.size, member.mode = len(token), 0o400
        archive.addfile(member, io.BytesIO(token.encode()))
    return buffer.getvalue()


def _port(engine: Engine, name: str) -> int:
    deadline = time.monotonic() + START_TIMEOUT
    while True:
        said = engine.logs(name)
        if found := _PORT.search(said):
            return int(found[1])
        ended = [state for state in engine.list({}) if state.name == name and state.phase.ended]
        if ended or time.monotonic() > deadline:
            raise ImageShipFailed(engine.node, f"does not serve: {said[-300:].decode(errors='replace') or 'no word'}")
        time.sleep(0.1)  # an engine's log cannot be waited for
