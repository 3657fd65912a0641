"""A project whose files have the worst names that a file system allows."""

from __future__ import annotations

import os

from tests.e2e.cli import Cli

NAMES = [
    "größe.txt",
    "配置/模型.yaml",
    "e\u0301 and \xe9",  # the same letter in two normal forms
    "x" * 255,
    "x" * 99 + "/" + "y" * 100,  # what the plain header of an archive just holds
    "z" * 101,
    "/".join(["a long name of a folder, and of all in it"] * 8),
    "ü" * 127 + "/" + "v" * 255,
    "two\nlines\n.txt",
    " blanks \t",
    "-rf",
    "--help/-",
    "quote'\"`$(touch it)\\",
    "~",
    "27 path=usr/lib/x",
    os.fsdecode(b"bytes \xff\xfe\x80"),
    os.fsdecode(b"bytes \xe9/" + b"w" * 120),
]
LINKS = {
    "lïnk": "größe.txt",
    "to nowhere": "./no//such/" + "t" * 200,
    "l" * 120: "../../" + "ö" * 60,
    "raw": os.fsdecode(b"bytes \xff"),
}


def project(cli: Cli) -> str:
    """A file of each name, its name as its content, and the links; the path there of a program that lists them."""
    for name in NAMES:
        path = cli.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(name))
    for name, target in LINKS.items():
        (cli.cwd / name).symlink_to(target)
    (cli.cwd / "run me").write_text("#!/bin/sh\n")
    (cli.cwd / "run me").chmod(0o755)
    return cli.program("lists.py")
