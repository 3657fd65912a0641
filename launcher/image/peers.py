"""Distribute an image to many nodes: push it once over the launcher's uplink, then nodes serve it to each other.

Nothing is installed: images/pack.py runs in a container of the image itself and reads the engine's store, and a client
pulls the archive with bash and `docker load`. Both sides have a token, generated per peer, sent over ssh and never on
a command line. The client's request and every piece of the response are authenticated with the token and a nonce of
each side, so that replayed or altered data never reaches the engine. The layers are sent unencrypted, like the
traffic between ranks.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

from launcher.errors import ImageShipFailed, LauncherError, NodesFailed, UsageError
from launcher.image.export import Store, stores
from launcher.image.image_locations import ImageLocations, find_same, image_store, same_image
from launcher.image.push import CHUNK, Transfer, deliver, is_part, is_slow, push, survey
from launcher.model.facts import ImageInfo, Reach
from launcher.model.progress import OnProgress
from launcher.node.connect import LOCAL
from launcher.node.engine import Engine
from launcher.node.parallel import on_each, run_all_catching
from launcher.planning.rendezvous import candidates

VARIABLE = "LAUNCHER_IMAGE_RELAY"  # minimum number of nodes without the image for nodes to serve each other; 0: never
MANY = 5
MANY_ON_SLOW_LINKS = 3
ENOUGH = 64 << 20  # bytes: sending less is faster than starting a peer
ENOUGH_FROM_A_NODE = 256 << 10  # the same if the bytes would pass the caller's link twice
CLIENTS = 2  # per peer, concurrently
START_TIMEOUT = 30.0
END_TIMEOUT = 10.0
REACH_TIMEOUT = 3.0
PULL_TIMEOUT = 4 * 3600.0  # seconds for one archive
PULLED = "launcher: pulled"
_PORT = re.compile(rb"^PORT (\d+)\n", re.MULTILINE)
_LOADED = re.compile(r"^Loaded image(?: ID)?: (\S+)$", re.MULTILINE)
# On the client. $1, $2: address and port, $3: KNOWN, $4: CHUNK; stdin: the token. Protocol: images/pack.py, `serve`.
# A piece is stored in an unlinked file until it is verified.
_PULL = f"""
PATH=$PATH:/usr/bin:/bin
digest() {{ sha256sum | cut -c1-64; }}
mac() {{ printf %s "$token:$(printf %s "$token:$1" | digest)" | digest; }}
pieces() {{
  count=0
  while IFS=" " read -r -t 600 size proof <&3; do
    [[ $size =~ ^[0-9]{{1,8}}$ ]] || break
    head -c "$size" <&3 >/proc/self/fd/4
    [ "$(mac "piece $nonces $count $size $(digest </proc/self/fd/4)")" = "$proof" ] || break
    [ "$size" = 0 ] && return
    cat /proc/self/fd/4
    count=$((count + 1))
  done
  echo "launcher: connection lost, or data failed authentication" >&2
  return 1
}}
set -o pipefail
IFS= read -r token
exec 3<>"/dev/tcp/$1/$2" || exit
IFS= read -r -t 30 hello <&3
mine=$(od -An -N16 -tx1 /dev/urandom | tr -d " \n")
nonces="$hello $mine"
printf "%s %s %s %s\n" "$mine" "$3" "$4" "$(mac "client $nonces $3 $4")" >&3
piece=$(mktemp) && exec 4<>"$piece" && rm "$piece" || exit
pieces | docker load --quiet && echo "{PULLED}"
"""


def push_or_relay(
    source: Engine, info: ImageInfo, name: str, targets: Sequence[Engine], locations: ImageLocations
) -> Mapping[str, int]:
    """Copy image `info` from `source` to all targets; return the bytes sent from here by node, 0 if a peer served it.

    All other nodes have it already. If a transfer between nodes fails, the launcher pushes. Raises NodesFailed.
    """
    if not _worthwhile(source, info, targets):
        return push(source, info, name, targets, locations.on_progress)
    sources = [engine for engine in locations.nodes if engine not in targets]
    rest, log = list(targets), locations.log
    sent, errors = dict.fromkeys((engine.node for engine in targets), 0), list[LauncherError]()

    def push_to(engines: Sequence[Engine]) -> bool:
        try:
            sent.update(push(source, info, name, engines, locations.on_progress))
        except LauncherError as error:  # raised at the end: the others get the image first
            errors.append(error)
            return False
        return True

    while rest and not sources:
        first = rest.pop(0)
        log(f"image {name}: copying to {first.node}, which then serves the other nodes")
        if push_to([first]):
            sources.append(first)
    left = pull_from_peers(sources, info, name, rest, locations) if rest else []
    if left:
        log(f"image {name}: copying from this machine to {', '.join(engine.node for engine in left)}")
        push_to(left)
    if errors:
        raise NodesFailed(errors, of=len(targets))
    return sent


def _worthwhile(source: Engine, info: ImageInfo, targets: Sequence[Engine]) -> bool:
    setting = os.environ.get(VARIABLE, "")
    if setting and not setting.isdigit():
        raise UsageError(VARIABLE, f"{setting} is not a number of nodes", "set a number; 0 disables it")
    slow = any(is_slow(engine.host) for engine in targets)
    many = int(setting) if setting else MANY_ON_SLOW_LINKS if slow else MANY
    if source.host != LOCAL:
        return many > 0 and survey(targets[0], info)[1] >= ENOUGH_FROM_A_NODE
    return 0 < many <= len(targets) and survey(targets[0], info)[1] >= ENOUGH


def pull_from_peers(
    sources: Sequence[Engine], info: ImageInfo, name: str, targets: Sequence[Engine], locations: ImageLocations
) -> list[Engine]:
    """Copy the image in rounds, each node serving CLIENTS others; return the nodes that did not get it."""
    facts = on_each([*sources, *targets], lambda engine: engine.facts())
    waiting, left, log = list(targets), list[Engine](), locations.log
    peers, joining = list[Peer](), list(sources)

    def start(engine: Engine) -> Peer:
        others = [facts[other] for other in targets if other is not engine]
        theirs = find_same(engine, info)
        return start_peer(engine, theirs.id if theirs else info.id, candidates([facts[engine], *others]))

    try:
        while waiting:
            for engine, outcome in zip(joining, run_all_catching([partial(start, e) for e in joining]), strict=True):
                if isinstance(outcome, Peer):
                    peers.append(outcome)
                else:
                    log(f"image {name}: {engine.node} cannot serve it: {outcome.what}")
            if not peers:
                return [*left, *waiting]
            count = len(peers) * CLIENTS
            clients, waiting = waiting[:count], waiting[count:]
            pairs = [(client, peers[index % len(peers)]) for index, client in enumerate(clients)]
            outcomes = run_all_catching(
                [partial(_pull_all, *pair, info, name, locations.on_progress) for pair in pairs]
            )
            joining = []
            for (client, peer), error in zip(pairs, outcomes, strict=True):
                (left if error else joining).append(client)
                log(f"image {name}: {client.node} {error.what if error else f'pulled it from {peer.engine.node}'}")
        return left
    finally:
        run_all_catching([peer.close for peer in peers])


@dataclass(frozen=True)
class Peer:
    """A node that serves an image, and its addresses."""

    engine: Engine
    addresses: Sequence[str]  # best first
    port: int
    token: str
    close: Callable[[], None]


def start_peer(engine: Engine, image: str, addresses: Sequence[str]) -> Peer:
    """Start serving `image`, an ID in the node's store. Raises LauncherError on failure."""
    errors = []
    for store in stores(engine):
        try:
            return _start_peer(engine, store, image, addresses)
        except ImageShipFailed as error:
            errors.append(error)
    raise errors[0] if errors else ImageShipFailed(engine.node, "unknown image store layout")


def _start_peer(engine: Engine, store: Store, image: str, addresses: Sequence[str]) -> Peer:
    """Start a container that exits when its stdin is closed: with this process or with the connection."""
    token, printed = secrets.token_hex(32), b""
    tool = replace(store.tool(image, "serve"), network="host", interactive=True)
    with ExitStack() as opened:
        process = opened.enter_context(closing(engine.tool(tool)))

        def close() -> None:
            deadline = time.monotonic() + END_TIMEOUT
            process.end_input()
            with closing(process):
                while time.monotonic() < deadline and process.receive(1.0) is not None:
                    pass

        process.send(f"{token}\n".encode())
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and (output := process.receive(1.0)) is not None:
            printed += b"".join(output)
            if found := _PORT.search(printed):
                opened.pop_all()  # keeps running
                return Peer(engine, addresses, int(found[1]), token, close)
    text = printed[-300:].decode(errors="replace").strip() or "no output"
    raise ImageShipFailed(engine.node, f"cannot serve the image: {text}")


def _pull_all(client: Engine, peer: Peer, info: ImageInfo, name: str, on_progress: OnProgress) -> None:
    address = reachable_address(client, peer)
    if address is None:
        where = f"{', '.join(peer.addresses)} port {peer.port}"
        raise ImageShipFailed(client.node, f"cannot connect to {peer.engine.node} at {where}")

    def send(known: int, chunk: int) -> None:
        on_progress(client.node, known * info.size // max(1, len(info.layers)), info.size)
        before = [image.id for image in image_store(client).list({})]
        check_loaded(client, info, pull_archive(client, peer, address, known, chunk), before)

    deliver(Transfer(client), info, name, send, CHUNK)
    on_progress(client.node, info.size, info.size)


def reachable_address(client: Engine, peer: Peer) -> str | None:
    """Return the first address of the peer that this node can reach, or None."""
    reached = (ip for ip in peer.addresses if client.machine.reach(ip, peer.port, REACH_TIMEOUT) is Reach.OPEN)
    return next(reached, None)


def pull_archive(client: Engine, peer: Peer, address: str, known: int, chunk: int) -> list[str]:
    """Load one archive from the peer, with layers from `known` on; return the names that `docker load` printed.

    Raises ImageShipFailed.
    """
    # sh reads this from its stdin, so the token is not on a command line
    script = f"exec bash -c {shlex.quote(_PULL)} bash \"$@\" 2>&1 <<'END'\n{peer.token}\nEND\n"
    arguments = (address, str(peer.port), str(known), str(chunk))
    printed = client.machine.script(script, *arguments, timeout=PULL_TIMEOUT).out.decode(errors="replace").strip()
    if not printed.endswith(PULLED):
        text = printed[-300:] or "connection lost"
        raise ImageShipFailed(client.node, f"could not pull it from {peer.engine.node}: {text}")
    return _LOADED.findall(printed)


def check_loaded(client: Engine, info: ImageInfo, loaded: Sequence[str], before: Sequence[str]) -> None:
    """Remove loaded images that are neither this image nor part of it: a peer could send anything.

    before: IDs of the images that the node had, which are never removed. Raises ImageShipFailed.
    """
    store = image_store(client)
    for name in loaded:
        image = store.inspect(name)
        if image is not None and not same_image(image, info) and not is_part(image, info):
            for reference in (image.tags or (image.id,)) if image.id not in before else ():
                store.remove(reference)
            raise ImageShipFailed(client.node, f"received an unexpected image, {name[:60]}, which was removed")
