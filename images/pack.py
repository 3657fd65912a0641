# Python 3.6 reads this.
# ruff: noqa: B904, PTH112, PTH118, PTH123, PTH208, UP031
"""Writes an image as an archive for `docker load`: only the layers asked for, at once and as they lie.

    python3 pack.py DOCKER_ROOT IMAGE_ID KNOWN [FILE]

`docker save` first copies a whole image to disk, then sends it. This reads what the engine's classic store keeps of
each layer: its files, and the rest of its tar byte for byte (tar-split). KNOWN layers, from the base up, are left out
unless they come again. Nothing needs to be trusted: whoever loads the archive checks every layer's digest.
FILE: where to write, a named pipe; by default standard output. Needs root, or a container that has both folders,
DOCKER_ROOT/image and DOCKER_ROOT/<driver>. Exit code 3: this store is not laid out like that; use `docker save`.
"""

import base64
import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile

PIECE = 1 << 20
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


def put_layer(out, name, layer, files):
    size = sum(len(raw) + content for raw, _, content in entries(layer))
    out.write(header(name, size))
    for raw, path, content in entries(layer):
        out.write(raw)
        if content:
            with open(os.path.join(files, path), "rb", buffering=0) as stream:
                if os.fstat(stream.fileno()).st_size != content:
                    raise LayoutError("%r is not of the size that the layer tells" % path)
                shutil.copyfileobj(stream, out, PIECE)
    out.write(padding(size))


def main(root, image, known, target):
    drivers = [d for d in os.listdir(os.path.join(root, "image")) if os.path.isdir(os.path.join(root, d))]
    if len(drivers) != 1:
        raise LayoutError("no classic image store below %s" % root)
    store = os.path.join(root, "image", drivers[0])
    digest = image.split(":")[1]
    config = read(store, "imagedb", "content", "sha256", digest)
    if hashlib.sha256(config).hexdigest() != digest:
        raise LayoutError("the image's configuration is not what its id says")
    diffs = json.loads(config.decode())["rootfs"]["diff_ids"]
    out = io.BufferedWriter(io.FileIO(target, "wb"), PIECE)
    names = ["blobs/sha256/" + diff.split(":")[1] for diff in diffs]
    put(out, digest + ".json", config)
    put(out, "manifest.json", json.dumps([{"Config": digest + ".json", "RepoTags": None, "Layers": names}]).encode())
    chain, done = "", set()
    for place, diff in enumerate(diffs):
        chain = "sha256:" + hashlib.sha256((chain + " " + diff).encode()).hexdigest() if chain else diff
        if diff in done or (place < known and diff not in diffs[known:]):
            continue
        done.add(diff)
        layer = os.path.join(store, "layerdb", "sha256", chain.split(":")[1])
        files = os.path.join(root, drivers[0], read(layer, "cache-id").decode(), "diff")
        put_layer(out, names[place], layer, files.encode())
    out.write(b"\0" * BLOCK * 2)
    out.flush()


try:
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else sys.stdout.fileno())
except LayoutError as problem:
    sys.stderr.write("%s\n" % problem)
    sys.exit(3)
