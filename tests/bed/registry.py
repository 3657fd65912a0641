"""A registry with one image and a password on this machine's loopback interface: enough for `docker pull`.

It counts the bytes of blobs by the port of the request, which shows who pulls through which port.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

USER, PASSWORD = "puller", "s3cret"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


class Registry:
    """Blobs by digest and one manifest, served with the Docker registry API V2."""

    def __init__(self, archive: Path) -> None:
        """archive: the output of `docker save` for one image; its layers are served uncompressed."""
        self.blobs: dict[str, bytes] = {}
        with tarfile.open(archive) as found:
            [image] = json.loads(found.extractfile("manifest.json").read())  # type: ignore[union-attr]
            config = self._add(found.extractfile(image["Config"]).read())  # type: ignore[union-attr]
            layers = [self._add(found.extractfile(name).read()) for name in image["Layers"]]  # type: ignore[union-attr]
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {"mediaType": "application/vnd.docker.container.image.v1+json", **config},
                "layers": [
                    {"mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip", **part} for part in layers
                ],
            }
        ).encode()
        self.digest = "sha256:" + hashlib.sha256(self.manifest).hexdigest()
        self.sent: Counter[int] = Counter()  # bytes of blobs, by port
        self.rate = 0  # bytes of a blob per second; 0: no limit
        self.broken = 0  # responses that the client aborted

    def _add(self, data: bytes) -> dict[str, object]:
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return {"digest": digest, "size": len(data)}


@contextmanager
def serving(registry: Registry) -> Iterator[int]:
    """Serves the registry; yields its port on 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            if self.headers.get("Authorization") != expected:
                self._answer(401, b"{}", {"WWW-Authenticate": 'Basic realm="test"'})
            elif self.path.rstrip("/") == "/v2":
                self._answer(200, b"{}", {})
            elif "/manifests/" in self.path:
                self._answer(
                    200, registry.manifest, {"Content-Type": MANIFEST, "Docker-Content-Digest": registry.digest}
                )
            elif (data := registry.blobs.get(self.path.rpartition("/")[2])) is not None:
                if self.command == "GET":
                    registry.sent[self.server.server_address[1]] += len(data)  # type: ignore[index]
                self._answer(200, data, {"Content-Type": "application/octet-stream"})
            else:
                self._answer(404, b"{}", {})

        def do_HEAD(self) -> None:
            self.do_GET()

        def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {
                **headers,
                "Content-Length": str(len(body)),
                "Docker-Distribution-Api-Version": "registry/2.0",
            }.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                piece = registry.rate // 20 or len(body) or 1
                try:
                    for start in range(0, len(body), piece):
                        self.wfile.write(body[start : start + piece])
                        time.sleep(0.05 if registry.rate else 0)
                except ConnectionError:
                    registry.broken += 1
                    self.close_connection = True

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def forwarded(config: Path, aliases: list[str], port: int, to: int | None = None) -> Iterator[None]:
    """Forwards a port of these nodes' loopback interfaces, on which engines accept a registry without TLS.

    to: the port of this machine, by default `port`.
    """
    way = ["-o", "ExitOnForwardFailure=yes", "-R", f"{port}:127.0.0.1:{to or port}"]
    tunnels = [subprocess.Popen(["ssh", "-F", str(config), "-N", *way, alias]) for alias in aliases]
    try:
        yield
    finally:
        for tunnel in tunnels:
            tunnel.terminate()
            tunnel.wait(10)
