"""An image to many nodes: once over the launcher's uplink, then the nodes that have it serve the others, ever more."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from launcher.errors import ImageShipFailed, LauncherError, NodesFailed, UsageError
from launcher.image import parallel
from launcher.image.link import is_slow
from launcher.image.places import Say
from launcher.image.progress import Progress, Tell
from launcher.image.serve import Server, serving, take, way
from launcher.image.ship import CHUNK, give_name, ship, survey
from launcher.image.stores import locate
from launcher.node.engine import Engine, ImageInfo
from launcher.plan.rendezvous import candidates

VARIABLE = "LAUNCHER_IMAGE_RELAY"  # how many nodes must lack an image before nodes serve one another; 0: they never do
MANY = 5
MANY_ON_SLOW_LINKS = 3
ENOUGH = 64 << 20  # bytes: less is sent in the time that it takes to get a node to serve
AT_ONCE = 2  # how many one node serves at a time


def distribute(
    source: Engine, info: ImageInfo, name: str, targets: Sequence[Engine], have: Sequence[Engine], say: Say, tell: Tell
) -> Mapping[str, int]:
    """Image `info` of `source` to all targets: bytes sent from here, by node; none to those that a node served.

    have: nodes that have it already. Whatever goes wrong between the nodes, the launcher sends by itself. Raises what
    ship() raises.
    """
    if not _worthwhile(info, targets):
        return ship(source, info, name, targets, tell)
    servers, rest = list(have), list(targets)
    sent, errors = dict.fromkeys((engine.node for engine in targets), 0), list[LauncherError]()

    def send(engines: Sequence[Engine]) -> bool:
        try:
            sent.update(ship(source, info, name, engines, tell))
        except LauncherError as error:  # told at the end: the others get it first
            errors.append(error)
            return False
        return True

    while rest and not servers:
        first = rest.pop(0)
        say(f"image {name}: {first.node} gets it first and hands it on")
        if send([first]):
            servers.append(first)
    left = hand_on(servers, info, name, rest, say, tell) if rest else []
    if left:
        say(f"image {name}: the launcher sends it to {', '.join(engine.node for engine in left)}")
        send(left)
    if errors:
        raise errors[0] if len(errors) == 1 else NodesFailed(errors, of=len(targets))
    return sent


def hand_on(
    servers: Sequence[Engine], info: ImageInfo, name: str, targets: Sequence[Engine], say: Say, tell: Tell
) -> list[Engine]:
    """In rounds: who has the image serves AT_ONCE others, which serve in the next round. Those who got nothing."""
    waiting, left = list(targets), list[Engine]()
    facts = {engine.node: engine.facts() for engine in (*servers, *targets)}
    stacks, serving_now, joining = list[ExitStack](), list[Server](), list(servers)

    def start(engine: Engine) -> Server | str:
        others = [facts[other.node] for other in targets if other is not engine]
        addresses = candidates([facts[engine.node], *others])
        with ExitStack() as stack:
            try:
                server = stack.enter_context(serving(engine, info.id, addresses))
            except LauncherError as error:
                return f"cannot hand it on: {error.what}"
            stacks.append(stack.pop_all())
            return server

    try:
        while waiting:
            for engine, server in zip(joining, parallel.each(start, joining), strict=True):
                if isinstance(server, Server):
                    serving_now.append(server)
                else:
                    say(f"image {name}: {engine.node} {server}")
            if not serving_now:
                return [*left, *waiting]
            now, waiting = waiting[: len(serving_now) * AT_ONCE], waiting[len(serving_now) * AT_ONCE :]
            pairs = [(client, serving_now[place % len(serving_now)]) for place, client in enumerate(now)]
            refusals = parallel.each(lambda pair: _get(*pair, info, name, tell), pairs)
            for (client, server), words in zip(pairs, refusals, strict=True):
                say(f"image {name}: {client.node} {words or f'has it from {server.engine.node}'}")
            left += [client for client, words in zip(now, refusals, strict=True) if words]
            joining = [client for client, words in zip(now, refusals, strict=True) if not words]
        return left
    finally:
        parallel.each(lambda stack: stack.close(), stacks)


def _get(client: Engine, server: Server, info: ImageInfo, name: str, tell: Tell) -> str:
    """Part after part, each going on where the last one ended. Why not, "" where all went well."""
    try:
        address = way(client, server)
        if address is None:
            return f"does not reach {server.engine.node} at {', '.join(server.addresses)} port {server.port}"
        before, layers = -1, max(1, len(info.layers))
        while locate(client, info) is None:
            target = survey(client, info)
            if target.known <= before:
                raise ImageShipFailed(client.node, f"took a part from {server.engine.node} and does not have it now")
            tell(Progress(client.node, target.known * info.size // layers, info.size))
            before = target.known
            take(client, server, address, target.known, 1 << 50 if target.whole else CHUNK)
        give_name(client, info, name)
        tell(Progress(client.node, info.size, info.size, done=True))
    except LauncherError as error:
        return error.what
    return ""


def _worthwhile(info: ImageInfo, targets: Sequence[Engine]) -> bool:
    least = os.environ.get(VARIABLE, "")
    if least and not least.isdigit():
        raise UsageError(VARIABLE, f"{least} is no number of nodes", "0 for never")
    slow = any(is_slow(engine.host) for engine in targets)
    many = int(least) if least else MANY_ON_SLOW_LINKS if slow else MANY
    return 0 < many <= len(targets) and survey(targets[0], info).total >= ENOUGH
