"""python3 -c THIS FOLDER MARKER: does the same as the shell script _SPANS of node/files.py, in one process.

It opens files as node/opened.py says. Runs on a node with its own Python, 3.6 or newer. All requests are read before
anything is printed.
"""

import os
import stat
import sys

assert sys.platform == "linux"  # for type checkers: the launcher itself may run on a Mac

PIECE = 1 << 20
NEVER_A_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


def open_below(root: int, path: bytes) -> int:
    """Return a descriptor of a regular file in the folder `root`. Raises OSError."""
    *folders, name = path.split(b"/")
    folder = os.dup(root)
    try:
        for step in folders:
            inner = os.open(step, os.O_PATH | os.O_DIRECTORY | NEVER_A_LINK, dir_fd=folder)
            os.close(folder)
            folder = inner
        file = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | NEVER_A_LINK, dir_fd=folder)
    finally:
        os.close(folder)
    found = os.fstat(file)
    if stat.S_ISREG(found.st_mode) and (found.st_uid == os.geteuid() or found.st_nlink == 1):
        return file
    os.close(file)
    raise OSError("not a regular file, or a hard link to another user's file")


def print_spans(requests: bytes, folder: bytes, marker: bytes) -> None:
    out = sys.stdout.buffer
    out.write(marker)
    try:
        root = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    except OSError:
        root = -1
    for line in requests.split(b"\n")[:-1]:
        offset, length, path = line.split(b" ", 2)
        try:
            file = open_below(root, path[2:-1])
        except OSError:  # removed, or not readable
            out.write(b"0\n" + marker)
            continue
        size = os.fstat(file).st_size
        start = max(0, int(offset) if int(offset) >= 0 else size + int(offset))
        left = max(0, min(size - start, int(length)))
        out.write(b"%d\n" % left)
        os.lseek(file, start, os.SEEK_SET)
        while left > 0:
            piece = os.read(file, min(left, PIECE))
            if not piece:  # truncated while it was read
                break
            out.write(piece)
            left -= len(piece)
        os.close(file)
        out.write(marker)
    out.flush()


if __name__ == "__main__":
    print_spans(sys.stdin.buffer.read(), os.fsencode(sys.argv[1]), sys.argv[2].encode() + b"\n")
