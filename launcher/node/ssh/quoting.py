"""A command as text that every login shell of a node reads the same way: sh, bash, zsh, fish, tcsh."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

# Within single quotes fish knows \\ and \', tcsh knows ! and no end of a line.
_DIFFERENT = re.compile(r"[\n!'\\]")
_DECODE = 'eval "exec $(printf %b "$1")"'


def quote(argv: Sequence[str]) -> str:
    """Quoted word by word; where shells differ, for a POSIX shell that the node's own one starts."""
    plain = shlex.join(argv)
    if not any(_DIFFERENT.search(word) for word in argv):
        return plain
    octal = _DIFFERENT.sub(lambda found: f"\\0{ord(found[0]):03o}", plain)
    return f"sh -c '{_DECODE}' launcher '{octal}'"
