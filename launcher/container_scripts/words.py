"""Analysis of the last output of a program, for launchers and for elastic.py in the container.

Python 3.7 without packages.
"""

from __future__ import annotations

import re

TRACEBACK = "Traceback (most recent call last):"
_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]: ?")  # torch and torchrun prefix each line with the rank
LINES = 20
LONGEST = 100  # characters of an error

# Output of a rank that lost a peer: it is a victim, whatever its traceback is.
VICTIM = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited|ncclRemoteError"
    r"|ncclSystemError.*closed by remote|Socket closed|Connection refused|recvValue failed|failed to recv"
    r"|SignalException.*signal: 15|got signal: 15|Timed out waiting .*ms for (recv|send)|store.*may have died",
    re.IGNORECASE,
)
# The same for programs without torch: errors when reading from a connection that the peer closed.
LOST_PEER = re.compile(
    VICTIM.pattern + r"|^EOFError$|IncompleteReadError|Expecting value: line 1 column 1 \(char 0\)", re.I | re.M
)
_VARIES = re.compile(r"0x[0-9a-fA-F]+|[0-9]{3,}")  # addresses, ports, process ids, generations


def last_output(text: str) -> str:
    """Return the last traceback; the last lines if there is none."""
    return last_traceback(text) or "\n".join(text.rstrip().splitlines()[-LINES:])


def error(text: str) -> str:
    """Return the error line of the last traceback; "" if there is none."""
    lines = [line for line in last_traceback(text).splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if not line.startswith((" ", "\t"))), "")
    return normalized(last)


def normalized(text: str) -> str:
    """Return the text in ASCII, truncated, and without numbers that differ between attempts."""
    return plain(_VARIES.sub("N", text))[:LONGEST].strip()


def plain(text: str) -> str:
    """Return the text as one line of printable ASCII."""
    return "".join(c if c.isprintable() else " " for c in text.encode("ascii", "backslashreplace").decode())


def last_traceback(text: str) -> str:
    """Return the last Python traceback in a text with its chained causes; "" if there is none."""
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    starts = [i for i, line in enumerate(lines) if line.endswith(TRACEBACK)]
    if not starts:
        return ""
    start = starts[-1]
    for earlier in reversed(starts[:-1]):
        between = "\n".join(lines[earlier:start])
        if "During handling of the above exception" not in between and "direct cause of the following" not in between:
            break
        start = earlier
    end = starts[-1] + 1
    while end < len(lines) and (lines[end].startswith((" ", "\t")) or not lines[end].strip()):
        end += 1
    return "\n".join(lines[start : end + 1]).rstrip()
