"""images/pack.py on a folder like containerd's content, and peers: unauthenticated data never reaches the engine."""

import hashlib
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from launcher.image.names import PARTIAL
from launcher.image.peers import _PULL as PULL
from launcher.image.peers import PULLED

PACK = Path(__file__).parents[2] / "images" / "pack.py"
LAYERS = [bytes([number]) * 3_000_000 for number in range(3)]
TOKEN = "a" * 64


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


class Content:
    """A store with one image behind an index, as after a pull from a registry."""

    def __init__(self, folder):
        self.folder = folder
        self.blobs = folder / "blobs" / "sha256"
        self.blobs.mkdir(parents=True)
        diffs = [digest(b"uncompressed" + layer[:1]) for layer in LAYERS]
        config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diffs}}
        self.config = self.put(json.dumps(config).encode())
        layers = [{"mediaType": "x", "digest": self.put(layer), "size": len(layer)} for layer in LAYERS]
        self.manifest = self.put(json.dumps({"config": {"digest": self.config}, "layers": layers}).encode())
        absent = {"digest": digest(b"another architecture")}
        self.image = self.put(json.dumps({"manifests": [absent, {"digest": self.manifest}]}).encode())

    def put(self, data):
        (self.blobs / digest(data)[7:]).write_bytes(data)
        return digest(data)

    def argv(self, *arguments):
        return [sys.executable, str(PACK), str(self.folder), self.image, *map(str, arguments)]

    def archive(self, known, chunk=1 << 40):
        done = subprocess.run(self.argv(known, chunk), check=True, capture_output=True)
        assert done.stderr.endswith(b"launcher: packed\n")
        return members(done.stdout)


def members(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as found:
        return {member.name: found.extractfile(member).read() for member in found}


def blob(name):
    return f"blobs/sha256/{name[7:]}"


@pytest.fixture
def content(tmp_path):
    return Content(tmp_path / "content")


def test_a_complete_image_has_a_manifest_for_both_kinds_of_stores(content):
    found = content.archive(0)
    assert json.loads(found["index.json"])["manifests"][0]["digest"] == content.manifest
    [listed] = json.loads(found["manifest.json"])
    assert listed == {"Config": blob(content.config), "RepoTags": None, "Layers": [blob(digest(x)) for x in LAYERS]}
    for name, data in found.items():
        assert not name.startswith("blobs/") or name == blob(digest(data))
    assert {blob(digest(layer)) for layer in LAYERS} < set(found)


def test_known_layers_are_omitted(content):
    found = content.archive(2)
    assert [digest(layer) for layer in LAYERS if blob(digest(layer)) in found] == [digest(LAYERS[2])]
    assert len(json.loads(found["manifest.json"])[0]["Layers"]) == 3


def test_a_part_is_an_image_of_the_layers_so_far(content):
    found = content.archive(1, chunk=1)
    assert sum(blob(digest(layer)) in found for layer in LAYERS) == 1
    [listed] = json.loads(found["manifest.json"])
    config = json.loads(found[listed["Config"]])
    assert config["config"]["Labels"] == {PARTIAL: content.image}
    assert len(config["rootfs"]["diff_ids"]) == len(listed["Layers"]) == 2
    [entry] = json.loads(found["index.json"])["manifests"]
    assert len(json.loads(found[blob(entry["digest"])])["layers"]) == 2


def test_a_store_without_all_layers_is_left_to_docker_save(content):
    (content.blobs / digest(LAYERS[0])[7:]).unlink()
    done = subprocess.run(content.argv(0, 1), capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (3, b"")


@pytest.fixture
def port(content):
    """Port of a peer that serves the image; it exits when its stdin is closed."""
    pipe = subprocess.PIPE
    with subprocess.Popen(content.argv("serve"), stdin=pipe, stdout=pipe, text=True) as process:
        process.stdin.write(f"{TOKEN}\n")
        process.stdin.flush()
        yield int(process.stdout.readline().split()[1])
        process.stdin.close()
        process.wait(10)


def pull(tmp_path, port, token=TOKEN):
    """Run the client's script with a `docker` that writes its stdin to a file; return success and that input."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\ncat >"{tmp_path}/loaded"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    argv = ["bash", "-c", PULL, "bash", "127.0.0.1", str(port), "0", str(1 << 40)]
    done = subprocess.run(
        argv, input=f"{token}\n", env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert not list(tmp_path.glob("tmp.*"))
    return done.stdout.strip().endswith(PULLED), (tmp_path / "loaded").read_bytes()


def test_a_client_with_the_token_gets_the_archive(content, tmp_path, port):
    success, loaded = pull(tmp_path, port)
    assert success
    assert members(loaded) == content.archive(0)


def test_a_client_without_the_token_gets_nothing(content, tmp_path, port):
    assert pull(tmp_path, port, token="b" * 64) == (False, b"")


def between(port, change):
    """Port of a man in the middle that relays connections to `port`; responses become change(connection, data)."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run():
        for number in range(2):
            client, _ = listener.accept()
            with client, socket.create_connection(("127.0.0.1", port)) as peer:
                client.sendall(change(number, peer.recv(100)))
                peer.sendall(client.recv(1000))
                peer.settimeout(2)
                whole = b"".join(iter(lambda: peer.recv(1 << 16), b""))
                client.sendall(change(number, whole))

    threading.Thread(target=run, daemon=True).start()
    return listener.getsockname()[1]


@pytest.mark.parametrize("position", [200, 5_000_000])
def test_altered_data_does_not_reach_the_engine(content, tmp_path, port, position):
    def change(_, data):
        return data if len(data) < position else data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]

    assert pull(tmp_path, between(port, change)) == (False, b"")


def test_a_response_to_an_earlier_client_cannot_be_replayed(content, tmp_path, port):
    earlier = []

    def change(number, data):
        earlier.append(data)
        return earlier[0 if len(data) < 100 else 1] if number else data

    attacked = between(port, change)
    assert pull(tmp_path, attacked)[0]
    assert pull(tmp_path, attacked) == (False, b"")
