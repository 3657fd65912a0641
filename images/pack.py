# Must run under Python 3.6.
# ruff: noqa: B904, PTH112, PTH118, PTH123, PTH208, UP031
"""Writes an image as an archive for `docker load`: only the requested layers, straight from the engine's store.

    python3 pack.py DOCKER_ROOT IMAGE_ID KNOWN CHUNK [FILE]
    python3 pack.py DOCKER_ROOT IMAGE_ID serve TOKEN_FILE

`docker save` first copies a whole image to disk, then sends it. This reads what the engine's classic store keeps of
each layer: its files, and the rest of its tar byte for byte (tar-split).

KNOWN: how many layers, from the base up, the receiver has; they are left out, unless a later layer is identical.
CHUNK: bytes after which the archive ends and another one follows with the next layers. Each archive but the last
is an image of the layers so far, labelled PARTIAL, so that a node whose connection is lost keeps what it has.
FILE: where to write, a named pipe; by default standard output.
serve: prints `PORT n` and writes one archive to every client that knows the token: the layers after the first KNOWN,
about CHUNK bytes of them. The server first sends a digest of the token, so that each side has proven itself:

    < sha256 of "launcher TOKEN"
    > TOKEN KNOWN CHUNK
    < the archive

The output need not be trusted: the engine that loads it checks every layer's digest. Needs root, or a container that
has both folders, DOCKER_ROOT/image and DOCKER_ROOT/<driver>. Exit code 3: the store has another layout; use
`docker save`.
"""

import base64
import gzip
import hashlib
import hmac
import io
import json
import os
import shutil
import socket
import sys
import tarfile
import threading

PIECE = 1 << 20
SEND_TIMEOUT = 600  # seconds without progress on a connection
PARTIAL = "launcher.image.partial"  # label: id of the image whose lower layers this one has
BLOCK = 512


class LayoutError(Exception):
    """The store is not laid out as expected."""


def read(*path):
    try:
        with open(os.path.join(*path), "rb") as stream:
            return stream.read()
    except OSError as error:
        raise LayoutError(str(error))


def entries(layer):
    """The parts of a layer's tar in order: (bytes, "", 0) as they are, or (b"", name, size) for a file's content."""
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


def header(name, size):
    member = tarfile.TarInfo(name)
    member.size = size
    member.mode = 0o644
    return member.tobuf(tarfile.GNU_FORMAT)


def padding(size):
    return b"\0" * (-size % BLOCK)


def put(out, name, data):
    out.write(header(name, len(data)) + data + padding(len(data)))


def size_of(layer):
    return sum(len(raw) + content for raw, _, content in entries(layer))


def put_layer(out, name, layer, files, size):
    out.write(header(name, size))
    for raw, path, content in entries(layer):
        out.write(raw)
        if content:
            with open(os.path.join(files, path), "rb", buffering=0) as stream:
                if os.fstat(stream.fileno()).st_size != content:
                    raise LayoutError("%r has not the size that the layer's record says" % path)
                shutil.copyfileobj(stream, out, PIECE)
    out.write(padding(size))


def chunks(sizes, known, limit):
    """Ranges of layers, each of at least `limit` bytes except the last; at least one, to send the configuration.

    The first is smaller: it shows early how fast the connection is.
    """
    begin, held, enough = known, 0, limit // 16
    for place in range(known, len(sizes)):
        held += sizes[place]
        if held >= enough and place + 1 < len(sizes):
            yield begin, place + 1
            begin, held, enough = place + 1, 0, limit
    yield begin, len(sizes)


def partial(config, image, count):
    """The configuration of an image that ends after `count` layers."""
    whole = json.loads(config.decode())
    lower = {key: whole[key] for key in ("architecture", "os", "variant") if key in whole}
    lower["config"] = {"Labels": {PARTIAL: image}}
    lower["rootfs"] = {"type": "layers", "diff_ids": whole["rootfs"]["diff_ids"][:count]}
    return json.dumps(lower, sort_keys=True).encode()


def write(root, image, known, limit, out, once=False):
    """All archives, or with `once` only the first one after the known layers."""
    drivers = [d for d in os.listdir(os.path.join(root, "image")) if os.path.isdir(os.path.join(root, d))]
    if len(drivers) != 1:
        raise LayoutError("no classic image store below %s" % root)
    store = os.path.join(root, "image", drivers[0])
    digest = image.split(":")[1]
    config = read(store, "imagedb", "content", "sha256", digest)
    if hashlib.sha256(config).hexdigest() != digest:
        raise LayoutError("the image's configuration does not match its id")
    diffs = json.loads(config.decode())["rootfs"]["diff_ids"]
    names = ["blobs/sha256/" + diff.split(":")[1] for diff in diffs]
    layers, chain = [], ""
    for diff in diffs:
        chain = "sha256:" + hashlib.sha256((chain + " " + diff).encode()).hexdigest() if chain else diff
        layers.append(os.path.join(store, "layerdb", "sha256", chain.split(":")[1]))
    sizes = [0] * min(known, len(diffs)) + [size_of(layer) for layer in layers[known:]]
    files = [os.path.join(root, drivers[0], read(layer, "cache-id").decode(), "diff") for layer in layers]
    for begin, end in chunks(sizes, min(known, len(diffs)), limit * 16 if once else limit):
        lower = config if end == len(diffs) else partial(config, image, end)
        name = hashlib.sha256(lower).hexdigest() + ".json"
        put(out, "manifest.json", json.dumps([{"Config": name, "RepoTags": None, "Layers": names[:end]}]).encode())
        put(out, name, lower)
        for place in range(begin, end):
            if diffs[place] not in diffs[begin:place]:
                put_layer(out, names[place], layers[place], files[place].encode(), sizes[place])
        out.write(b"\0" * BLOCK * 2)
        if once:
            break
    out.flush()


def serve(root, image, token):
    """Serves clients until the process is killed."""
    listener = socket.socket()
    listener.bind(("", 0))
    listener.listen(16)
    sys.stdout.write("PORT %d\n" % listener.getsockname()[1])
    sys.stdout.flush()
    while True:
        connection = listener.accept()[0]
        threading.Thread(target=answer, args=(connection, root, image, token), daemon=True).start()


def answer(connection, root, image, token):
    with connection:
        try:
            connection.settimeout(SEND_TIMEOUT)
            connection.sendall(hashlib.sha256(b"launcher " + token).hexdigest().encode() + b"\n")
            with connection.makefile("rb") as request:
                words = request.readline(400).split()
            if len(words) == 3 and hmac.compare_digest(words[0], token):
                with connection.makefile("wb", PIECE) as out:
                    write(root, image, int(words[1]), int(words[2]), out, once=True)
        except (LayoutError, OSError, ValueError) as problem:  # the client sees a truncated archive
            sys.stderr.write("%s\n" % problem)
            sys.stderr.flush()


def main(root, image, what, *rest):
    if what == "serve":
        return serve(root, image, read(rest[0]).strip())
    target = rest[1] if len(rest) > 1 else sys.stdout.fileno()
    with io.BufferedWriter(io.FileIO(target, "wb"), PIECE) as out:
        return write(root, image, int(what), int(rest[0]), out)


try:
    main(*sys.argv[1:])
except LayoutError as problem:
    sys.stderr.write("%s\n" % problem)
    sys.exit(3)
