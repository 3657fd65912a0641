"""A network delay in front of nodes: a TCP proxy on loopback ports that hands every byte on a moment later.

Each byte, and the end of each direction, is late by `seconds`, and so is each packet of TCP's handshake, as far as an
ssh server and its client can tell: the server hears of a connection 3 x `seconds` after the client asked for it, and
the first byte that it sends is there after 4 x `seconds`, two round trips. Throughput is not limited.

The proxy has no process of its own: it ends with the process that uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bed.bed import Bed

_PIECE = 1 << 16
_UNDER_WAY = 4096  # pieces in flight, 256 MiB: bounds the memory, not the throughput of any test


async def serve_delayed(address: str, port: int, seconds: float) -> asyncio.Server:
    """A server on a free loopback port that passes each connection on to `address`:`port`, delayed each way."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # the server is closing, and the connection with it
            await _pass_on(reader, writer, address, port, seconds)
        writer.close()

    return await asyncio.start_server(connected, "127.0.0.1", 0, backlog=512)


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, port: int, seconds: float
) -> None:
    """Both directions of one connection, until both have ended."""
    accepted = asyncio.get_running_loop().time()
    there, back = _queue(), _queue()
    reading = asyncio.create_task(_read(reader, there, seconds, accepted + 2 * seconds))  # it sends after the SYN-ACK
    try:
        await asyncio.sleep(3 * seconds)  # SYN, SYN-ACK, and the ACK that tells the server
        inner_reader, inner_writer = await asyncio.open_connection(address, port)
    except OSError:  # nothing listens there: the client sees the connection end
        reading.cancel()
        return
    tasks = (_deliver(there, inner_writer), _read(inner_reader, back, seconds, 0.0), _deliver(back, writer))
    await asyncio.gather(reading, *tasks)
    inner_writer.close()


_Queue = asyncio.Queue[tuple[float, bytes]]  # what is under way: when it is due, and b"" for the end of the stream


def _queue() -> _Queue:
    return asyncio.Queue(_UNDER_WAY)


async def _read(reader: asyncio.StreamReader, under_way: _Queue, seconds: float, earliest: float) -> None:
    """Every piece is due `seconds` after it was read, or after `earliest` where that is later."""
    loop = asyncio.get_running_loop()
    data = b"-"
    while data:
        try:
            data = await reader.read(_PIECE)
        except OSError:
            data = b""
        await under_way.put((max(loop.time(), earliest) + seconds, data))


async def _deliver(under_way: _Queue, writer: asyncio.StreamWriter) -> None:
    """Until the end of the stream; what cannot be delivered any more is dropped."""
    loop = asyncio.get_running_loop()
    while True:
        due, data = await under_way.get()
        await asyncio.sleep(due - loop.time())
        with contextlib.suppress(OSError):
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
        if not data:
            return


@contextlib.contextmanager
def delayed_ports(targets: Sequence[tuple[str, int]], seconds: float) -> Iterator[list[int]]:
    """Loopback ports behind which these (address, port) are, `seconds` away each way."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="delay", daemon=True)
    thread.start()

    async def begin() -> list[asyncio.Server]:
        return [await serve_delayed(address, port, seconds) for address, port in targets]

    async def end() -> None:
        for server in servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    servers = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    try:
        yield [int(server.sockets[0].getsockname()[1]) for server in servers]
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.contextmanager
def delayed(bed: Bed, seconds: float) -> Iterator[Path]:
    """An ssh config with the bed's aliases in which the nodes are `seconds` away each way.

    Only ssh connections to the nodes are late; what nodes send to each other is not. Host keys verify as ever. Not for
    the aliases that log in as another user or through a jump host: those lead to the nodes as in the bed's own config.
    """
    with (
        delayed_ports([(node.address, 22) for node in bed.nodes], seconds) as ports,
        tempfile.TemporaryDirectory(prefix="bed-delay-") as name,
    ):
        # OpenSSH takes the first value it meets: these go before the bed's own. The host keys are under the addresses.
        nodes = "".join(
            f"Host {node.alias}\n    HostName 127.0.0.1\n    Port {port}\n    HostKeyAlias {node.address}\n\n"
            for node, port in zip(bed.nodes, ports, strict=True)
        )
        config = Path(name) / "ssh_config"
        config.write_text(nodes + bed.ssh_config.read_text())
        yield config
