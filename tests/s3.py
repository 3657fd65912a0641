"""A store that speaks S3: moto's server in a thread of this process, with faults of our own in front of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

BUCKET = "bucket"
Answer = tuple[str, list[tuple[str, str]], bytes]  # status, headers, body


def refused(status: str, code: str, *headers: tuple[str, str]) -> Answer:
    """An error as S3 sends it."""
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    return status, [("Content-Type", "application/xml"), *headers], body


@dataclass
class Store:
    """asked: method and path of all requests so far. fault: called before each; returns an answer in its place.

    rate: bytes that it takes per second, 0 for any number. sent: bytes of objects that it has sent so far.
    """

    url: str
    asked: list[tuple[str, str]] = field(default_factory=list)
    fault: Callable[[str, str], Answer | None] = lambda _method, _path: None
    rate: float = 0
    sent: int = 0

    @property
    def variables(self) -> dict[str, str]:
        """What a client needs to use it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        import boto3  # here, as each worker of pytest would wait seconds for it

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )

    def sizes(self) -> dict[str, int]:
        """The bytes of all objects by their names."""
        return {each["Key"]: each["Size"] for each in self.client().list_objects_v2(Bucket=BUCKET).get("Contents", ())}

    def content(self, name: str) -> bytes:
        content: bytes = self.client().get_object(Bucket=BUCKET, Key=name)["Body"].read()
        return content


@contextmanager
def s3(address: str = "127.0.0.1") -> Iterator[Store]:
    """An empty store with one bucket. address: of this machine, at which others may reach it."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = DomainDispatcherApplication(create_backend_app)

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        store.asked.append((method, path))
        size = int(environ.get("CONTENT_LENGTH") or 0)
        if store.rate:
            time.sleep(size / store.rate)
        if given := store.fault(method, path):
            environ["wsgi.input"].read(size)
            start_response(given[0], given[1])
            return [given[2] if method != "HEAD" else b""]
        result: Iterable[bytes] = app(environ, start_response)
        return counted(result) if method == "GET" and path.count("/") > 1 else result

    def counted(result: Iterable[bytes]) -> Iterator[bytes]:
        for piece in result:
            store.sent += len(piece)
            yield piece

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = make_server(address, 0, answer, threaded=True)
    store = Store(f"http://{address}:{server.port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        store.client().create_bucket(Bucket=BUCKET)
        store.asked.clear()
        yield store
        app_reset(store)
    finally:
        server.shutdown()
        server.server_close()


def app_reset(store: Store) -> None:
    """moto keeps its buckets for the whole process."""
    client = store.client()
    store.fault = lambda _method, _path: None
    for name in store.sizes():
        client.delete_object(Bucket=BUCKET, Key=name)
    client.delete_bucket(Bucket=BUCKET)
