# Must run under Python 3.6.
# ruff: noqa: B904, PTH110, PTH112, PTH118, PTH123, PTH208, UP031
"""Write an image as an archive for `docker load`, with only the requested layers, directly from the engine's store.

    python3 pack.py STORE IMAGE_ID KNOWN CHUNK
    python3 pack.py STORE IMAGE_ID serve

`docker save` reads the complete image, and the classic store copies it to disk first. This script reads the stored
layers: from the classic store a layer's files and the rest of its tar archive (tar-split), from containerd's store the
blob. The archive is an OCI layout with Docker's manifest.json: engines with either kind of store load it without
opening layers that they have.

STORE: the folder of the classic store (with `image` and the driver's folder), or of containerd's content.
KNOWN: the number of layers, from the base up, that the receiver has; they are omitted, unless a later layer is
identical.
CHUNK: bytes of layers after which the archive ends. If layers remain, the archive is an image of the layers so far,
labelled PARTIAL, so that a node that loses its connection keeps them.
serve: read a token from stdin, print `PORT n`, and until stdin is closed, send one archive to every client that
authenticates with the token. H is mac() below:

    < nonce
    > nonce KNOWN CHUNK H(client, both nonces, KNOWN, CHUNK)
    < size H(piece, both nonces, its number, size, digest) and the piece; an empty one is the last

The last line on stderr is DONE after a complete archive. Needs root, or a container with the store's folders. Exit code
3: the store has another layout, or the image is incomplete; use `docker save`.
"""

import base64
import gzip
import hashlib
import hmac
import json
import os
import secrets
import shutil
import socket
import sys
import tarfile
import threading

PIECE = 1 << 20
PIECE_LIMIT = 1 << 24  # bytes per authenticated piece
SEND_TIMEOUT = 600  # seconds without progress on a connection
PARTIAL = "launcher.image.partial"  # label: ID of the complete image
DONE = "launcher: packed\n"
BLOCK = 512
OCI = "application/vnd.oci.image."


class LayoutError(Exception):
    """The store is not laid out as expected."""


def read(*path):
    try:
        with open(os.path.join(*path), "rb") as stream:
            return stream.read()
    except OSError as error:
        raise LayoutError(str(error))


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def descriptor(kind, digest, size):
    return {"mediaType": OCI + kind, "digest": digest, "size": size}


class Classic:
    """An image of the classic store: config, manifest (None: to be created) and layers, as descriptors."""

    manifest = None

    def __init__(self, root, image):
        drivers = [d for d in os.listdir(os.path.join(root, "image")) if os.path.isdir(os.path.join(root, d))]
        if len(drivers) != 1:
            raise LayoutError("no classic image store in %s" % root)
        store = os.path.join(root, "image", drivers[0])
        self.config = read(store, "imagedb", "content", "sha256", image.split(":")[1])
        if "sha256:" + sha256(self.config) != image:
            raise LayoutError("the image's configuration does not match its ID")
        self.layers, self.folders, chain = [], {}, ""
        for diff in json.loads(self.config.decode())["rootfs"]["diff_ids"]:
            chain = "sha256:" + sha256((chain + " " + diff).encode()) if chain else diff
            layer = os.path.join(store, "layerdb", "sha256", chain.split(":")[1])
            files = os.path.join(root, drivers[0], read(layer, "cache-id").decode(), "diff")
            self.folders[diff] = layer, files.encode()
            size = sum(len(raw) + content for raw, _, content in self.entries(layer))
            self.layers.append(descriptor("layer.v1.tar", diff, size))

    def entries(self, layer):
        """Yield the parts of a layer's tar in order: (bytes, b"", 0), or (b"", name, size) for a file's content."""
        try:
            with gzip.open(os.path.join(layer, "tar-split.json.gz"), "rt", encoding="utf-8") as lines:
                for line in lines:
                    entry = json.loads(line)
                    if entry["type"] == 2:
                        yield base64.b64decode(entry["payload"]), b"", 0
                    elif entry["type"] == 1 and entry.get("size"):
                        raw = entry.get("name_raw")
                        yield b"", base64.b64decode(raw) if raw else entry["name"].encode(), entry["size"]
        except (OSError, ValueError, KeyError) as error:
            raise LayoutError(str(error))

    def copy(self, digest, out):
        layer, files = self.folders[digest]
        for raw, path, content in self.entries(layer):
            out.write(raw)
            if content:
                with open(os.path.join(files, path), "rb", buffering=0) as stream:
                    if os.fstat(stream.fileno()).st_size != content:
                        raise LayoutError("the size of %r differs from the layer's record" % path)
                    shutil.copyfileobj(stream, out, PIECE)


class Containerd:
    """An image of containerd's store, whose layers may be compressed."""

    def __init__(self, root, image):
        self.folder = os.path.join(root, "blobs", "sha256")
        self.manifest = read(self.path(image))
        found = json.loads(self.manifest.decode())
        for entry in found.get("manifests", ()):  # an index: the engine runs the first manifest that exists
            if os.path.exists(self.path(entry["digest"])) and "attestation" not in str(entry.get("annotations")):
                self.manifest = read(self.path(entry["digest"]))
                found = json.loads(self.manifest.decode())
                break
        self.layers = found.get("layers", [])
        self.config = read(self.path(found["config"]["digest"])) if "config" in found else b""
        if not self.config or not all(os.path.exists(self.path(layer["digest"])) for layer in self.layers):
            raise LayoutError("containerd's store lacks parts of the image")

    def path(self, digest):
        return os.path.join(self.folder, digest.split(":")[1])

    def copy(self, digest, out):
        with open(self.path(digest), "rb", buffering=0) as stream:
            shutil.copyfileobj(stream, out, PIECE)


def header(name, size):
    member = tarfile.TarInfo(name)
    member.size = size
    member.mode = 0o644
    return member.tobuf(tarfile.GNU_FORMAT)


def padding(size):
    return b"\0" * (-size % BLOCK)


def put(out, name, data):
    out.write(header(name, len(data)) + data + padding(len(data)))


def blob(digest):
    return "blobs/sha256/" + digest.split(":")[1]


def partial(config, image, count):
    """Return the configuration of an image that ends after `count` layers."""
    whole = json.loads(config.decode())
    lower = {key: whole[key] for key in ("architecture", "os", "variant") if key in whole}
    lower["config"] = {"Labels": {PARTIAL: image}}
    lower["rootfs"] = {"type": "layers", "diff_ids": whole["rootfs"]["diff_ids"][:count]}
    return json.dumps(lower, sort_keys=True).encode()


def write(source, image, known, limit, out):
    """Write one archive with the layers from `known` on, up to about `limit` bytes."""
    layers, held = source.layers, 0
    end = begin = min(known, len(layers))
    while end < len(layers) and (end == begin or held < limit):
        held += layers[end]["size"]
        end += 1
    config, manifest = source.config, source.manifest
    if end < len(layers):
        config, manifest = partial(config, image, end), None
    config_digest = "sha256:" + sha256(config)
    if manifest is None:
        parts = {"schemaVersion": 2, "mediaType": OCI + "manifest.v1+json", "layers": layers[:end]}
        parts["config"] = descriptor("config.v1+json", config_digest, len(config))
        manifest = json.dumps(parts, sort_keys=True).encode()
    kind = json.loads(manifest.decode()).get("mediaType", OCI + "manifest.v1+json")
    entry = {"mediaType": kind, "digest": "sha256:" + sha256(manifest), "size": len(manifest)}
    index = {"schemaVersion": 2, "mediaType": OCI + "index.v1+json", "manifests": [entry]}
    names = [layer["digest"] for layer in layers[:end]]
    listed = [{"Config": blob(config_digest), "RepoTags": None, "Layers": [blob(name) for name in names]}]
    put(out, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
    put(out, "index.json", json.dumps(index).encode())
    put(out, "manifest.json", json.dumps(listed).encode())
    put(out, blob(entry["digest"]), manifest)
    put(out, blob(config_digest), config)
    for index in range(begin, end):
        if names[index] not in names[begin:index]:
            out.write(header(blob(names[index]), layers[index]["size"]))
            source.copy(names[index], out)
            out.write(padding(layers[index]["size"]))
    out.write(bytes(2 * BLOCK))
    out.flush()


def mac(token, *values):
    """Return an authentication code, computed as in the client's bash: two rounds of SHA-256, as in HMAC."""
    inner = sha256(("%s:%s" % (token, " ".join(map(str, values)))).encode())
    return sha256(("%s:%s" % (token, inner)).encode())


class Authenticated:
    """A connection that sends data in authenticated pieces."""

    def __init__(self, connection, token, nonces):
        self.connection, self.token, self.nonces = connection, token, nonces
        self.held, self.count = bytearray(), 0

    def write(self, data):
        self.held += data
        while len(self.held) >= PIECE_LIMIT:
            self.send(bytes(self.held[:PIECE_LIMIT]))
            del self.held[:PIECE_LIMIT]

    def flush(self):
        """End the archive."""
        if self.held:
            self.send(bytes(self.held))
        self.send(b"")

    def send(self, piece):
        proof = mac(self.token, "piece", self.nonces, self.count, len(piece), sha256(piece))
        self.connection.sendall(("%d %s\n" % (len(piece), proof)).encode() + piece)
        self.count += 1


def serve(source, image):
    """Serve clients until stdin is closed."""
    token = sys.stdin.readline().strip()
    listener = socket.socket()
    listener.bind(("", 0))
    listener.listen(16)
    sys.stdout.write("PORT %d\n" % listener.getsockname()[1])
    sys.stdout.flush()
    threading.Thread(target=accept, args=(listener, source, image, token), daemon=True).start()
    sys.stdin.read()


def accept(listener, source, image, token):
    while True:
        connection = listener.accept()[0]
        threading.Thread(target=answer, args=(connection, source, image, token), daemon=True).start()


def answer(connection, source, image, token):
    with connection:
        try:
            connection.settimeout(SEND_TIMEOUT)
            nonce = secrets.token_hex(16)
            connection.sendall(nonce.encode() + b"\n")
            with connection.makefile("r", encoding="ascii") as request:
                fields = request.readline(400).split()
            if len(fields) == 4:
                theirs, known, chunk, proof = fields
                nonces = nonce + " " + theirs
                if hmac.compare_digest(mac(token, "client", nonces, known, chunk), proof):
                    write(source, image, int(known), int(chunk), Authenticated(connection, token, nonces))
        except (LayoutError, OSError, ValueError) as problem:  # the client sees a truncated archive
            sys.stderr.write("%s\n" % problem)
            sys.stderr.flush()


def main(root, image, what, chunk=""):
    source = (Containerd if os.path.isdir(os.path.join(root, "blobs")) else Classic)(root, image)
    if what == "serve":
        serve(source, image)
        return
    with open(sys.stdout.fileno(), "wb", PIECE) as out:
        write(source, image, int(what), int(chunk), out)
    sys.stderr.write(DONE)


try:
    main(*sys.argv[1:])
except (LayoutError, OSError) as problem:
    sys.stderr.write("%s\n" % problem)
    sys.exit(3)
