"""A network delay in front of nodes: a TCP proxy on loopback ports that delays every byte.

Each byte, and the end of each direction, is delayed by `seconds`. So is each packet of TCP's handshake, as seen by an
ssh server and its client: the server sees a connection 3 x `seconds` after the client requested it, and its first byte
arrives after 4 x `seconds`, two round trips. Throughput is not limited.

The proxy runs inside the process that uses it.
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
_IN_FLIGHT = 4096  # pieces, 256 MiB: bounds the memory, not the throughput of any test


async def serve_delayed(address: str, port: int, seconds: float) -> asyncio.Server:
    """A server on a free loopback port that forwards each connection to `address`:`port`, delayed each way."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # the server is closing, and the connection with it
            await _forward(reader, writer, address, port, seconds)
        writer.close()

    return await asyncio.start_server(connected, "127.0.0.1", 0, backlog=512)


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, port: int, seconds: float
) -> None:
    """Forwards both directions of one connection until both have ended."""
    accepted = asyncio.get_running_loop().time()
    forth, back = _queue(), _queue()
    reading = asyncio.create_task(
        _read(reader, forth, seconds, accepted + 2 * seconds)
    )  # the client sends after the SYN-ACK
    try:
        await asyncio.sleep(3 * seconds)  # SYN, SYN-ACK, and the ACK that reaches the server
        inner_reader, inner_writer = await asyncio.open_connection(address, port)
    except OSError:  # nothing listens there: the client sees the connection end
        reading.cancel()
        return
    tasks = (_deliver(forth, inner_writer), _read(inner_reader, back, seconds, 0.0), _deliver(back, writer))
    await asyncio.gather(reading, *tasks)
    inner_writer.close()


_Queue = asyncio.Queue[tuple[float, bytes]]  # data in flight: (due time, data); b"" is the end of the stream


def _queue() -> _Queue:
    return asyncio.Queue(_IN_FLIGHT)


async def _read(reader: asyncio.StreamReader, in_flight: _Queue, seconds: float, earliest: float) -> None:
    """Queues every piece, due `seconds` after it was read, or after `earliest` if that is later."""
    loop = asyncio.get_running_loop()
    data = b"-"
    while data:
        try:
            data = await reader.read(_PIECE)
        except OSError:
            data = b""
        await in_flight.put((max(loop.time(), earliest) + seconds, data))


async def _deliver(in_flight: _Queue, writer: asyncio.StreamWriter) -> None:
    """Writes every piece when it is due, until the end of the stream; undeliverable data is dropped."""
    loop = asyncio.get_running_loop()
    while True:
        due, data = await in_flight.get()
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
    """Loopback ports that forward to these (address, port), delayed by `seconds` each way."""
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
    """An ssh config with the bed's aliases in which the nodes are behind a delay of `seconds` each way.

    Only ssh connections to the nodes are delayed, not traffic between nodes. Host keys are verified as usual. Aliases
    for other users or with a jump host are not delayed.
    """
    with (
        delayed_ports([(node.address, 22) for node in bed.nodes], seconds) as ports,
        tempfile.TemporaryDirectory(prefix="bed-delay-") as name,
    ):
        # OpenSSH uses the first value it finds, so these come first. The host keys are stored under the addresses.
        nodes = "".join(
            f"Host {node.alias}\n    HostName 127.0.0.1\n    Port {port}\n    HostKeyAlias {node.address}\n\n"
            for node, port in zip(bed.nodes, ports, strict=True)
        )
        config = Path(name) / "ssh_config"
        config.write_text(nodes + bed.ssh_config.read_text())
        yield config
