"""Analysis of the last output of a program, for launchers and for elastic.py in the container.

Python 3.7 without packages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TRACEBACK = "Traceback (most recent call last):"
LINES = 20
MOST_RANKS = 100  # of a log whose tracebacks are read: it is that of one node
LONGEST = 100  # characters of an error that is compared
LONGEST_ERROR = 500  # of an error that is shown in one line
LONGEST_LINE = 2000  # of a line in which a pattern is searched: the time for some grows with its square
_REFUSED = re.compile(r"launcher: node \S+: ")  # by entry.sh
# The end of an output with which a program refuses its arguments, as argparse prints it, and entry.sh's own
_TOLD = re.compile(rf"(?:(?:\S+ -m )?[^\s:]+: error: |{_REFUSED.pattern})\S")
# The same from parsers that print the usage before it: jsonargparse, click, typer in a frame
_USAGE = re.compile(r"^[uU]sage: .*$", re.MULTILINE)
_AFTER_USAGE = re.compile(
    r"^(?:error: \S.*(?:\n[ \t]+\S.*)*|Error: \S.*"
    r"|\u256d\u2500 Error \u2500+\u256e\n(?:\u2502.*\n)+\u2570\u2500+\u256f)\Z",
    re.MULTILINE,
)
# What Python says of a script that it cannot compile: without the first line of a traceback
_NOT_COMPILED = re.compile(
    r'^(?:  File "[^"\n]*", line \d+\n(?: .*\n){0,4})?(?:SyntaxError|IndentationError|TabError): .*\Z', re.MULTILINE
)
_FRAME_OF_TYPER = re.compile(r"^[\u256d\u2570].*$|^\u2502|\u2502$", re.MULTILINE)
# and from those that print how to get help after it: fire, absl
_BEFORE_HELP = re.compile(
    r"^(?:ERROR: (.*)\nUsage: (?:.*\n){1,100} +\S.* --help|FATAL Flags parsing error:\s*(.*)\nPass --helpshort .*)\Z",
    re.MULTILINE,
)

_PREFIX = re.compile(r"^(?:\[(?:rank|default)\d+\]: ?)+")  # torch and torchrun prefix each line with the rank
_CONTEXT = "During handling of the above exception, another exception occurred:"
_CAUSE = "The above exception was the direct cause of the following exception:"
# Before the traceback of an error that did not end the program by itself
_ASIDE = re.compile(r"Exception ignored |Exception in thread |--- Logging error ---|Task exception was never|future: <")
# What started the ranks tells that one failed: their own tracebacks are above
_STARTER = re.compile(
    r"\S\.errors\.ChildFailedError:|\S\.ProcessExitedException:"
    r"|/(accelerate|deepspeed)/[^\0]{0,2000}CalledProcessError: "
)
_FRAME = re.compile(r'^\s+File "([^"]*)", line \d+', re.MULTILINE)
_ERROR = re.compile(r"([A-Za-z_][\w.<>]*)(?:: (.*))?", re.DOTALL)
_CONTROL = re.compile(r"StopIteration|StopAsyncIteration|GeneratorExit|(_?queue\.)?(Empty|Full)")  # of normal programs
_OF_NCCL = re.compile(r"nccl\w+: |(NCCL )?Last [Ee]rror:")  # the next lines of its errors
_VARIES = re.compile(r"0x[0-9a-fA-F]+|[0-9]{3,}")  # addresses, ports, process ids, generations

# What torch.distributed, gloo and NCCL say if another rank ended, did not join a collective or was not there.
_LOST = re.compile(
    r"connection (was likely )?(closed|reset|refused|timed out)|(read|write) error \[|caused pair closure|broken pipe"
    r"|closed by remote|socket closed|remote process exited|ncclRemoteError|(recv|send)(Value|Bytes)\w* failed"
    r"|failed to recv|timed out waiting \d+ms for (recv|send)|collective operation timeout|may have died"
    r"|failed to pass monitoredBarrier|got signal: 15|socket timeout|client socket has (timed out|failed to connect)"
    r"|seconds waiting for clients|wait timeout after \d+|eof \(this error originated at tensorpipe",
    re.IGNORECASE,
)
# These words alone prove nothing: a program's own HTTP client says the same. The error must come from them, by its
# class, by the C++ source that its message names, or by the module whose call failed. Checkpoints are files.
_CLASS = re.compile(r"torch\.distributed\.(?!checkpoint\.)[\w.]+|c10::Dist\w+|c10d?::\w+|gloo::\w+")
_SOURCE = re.compile(
    r"\bgloo/\w+/|\bc10d/|\bProcessGroup\w+\.[ch]pp|\b(NCCLUtils|TCPStore|socket)\.[ch]pp|\btensorpipe/|\[c10d\]"
    r"|\bNCCL (error( in)?:|communicator was|operation timed out|Async Error|[\w ]+ failed:|WARN)"
    r"|watchdog thread terminated|c10d key-value store|\b(gloo|c10d?)::\w+"
)
_RETRIED = re.compile(r"\[W.*(refused|retrying|failed to connect)")  # until the master is there: a program's start
_MODULE = re.compile(r"/torch/(distributed/(?!checkpoint/)|nn/parallel/distributed\.py)")
_COLLECTIVE = re.compile(r"gloo|nccl|monitoredBarrier", re.IGNORECASE)  # rather than the store
# Clients of servers that are no peers, in the frames of a program without torch
_CLIENT = re.compile(
    r"/(urllib|urllib3|http|httpx|httpcore|requests|aiohttp|xmlrpc|boto3|botocore|s3fs|gcsfs|fsspec|smart_open|google"
    r"|azure|huggingface_hub|datasets|wandb|mlflow|redis|pymongo|psycopg2?|pymysql|sqlalchemy)/|/(ftplib|smtplib)\.py"
)
_CLOSED = re.compile(  # what reading from a connection that the peer closed raises
    r"connection (closed|reset|refused)|broken pipe|socket closed|^EOFError$|IncompleteReadError"
    r"|Expecting value: line 1 column 1 \(char 0\)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Raised:
    """An exception of a traceback."""

    kind: str  # its class: torch.distributed.DistBackendError
    message: str
    files: tuple[str, ...]  # of its frames, the call that failed last

    @property
    def line(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


def bounded(text: str) -> str:
    """Return the text of a program with long lines without their middle, before any pattern is searched in it."""
    half = LONGEST_LINE // 2
    lines = text.split("\n")
    cut = (line if len(line) <= LONGEST_LINE else f"{line[:half]} [...] {line[-half:]}" for line in lines)
    return "\n".join(cut)


def error_or_last_lines(text: str) -> str:
    """Return the program's own words about its failure; the last lines if there are none."""
    return error_text(text) or "\n".join(text.rstrip().splitlines()[-LINES:])


def error_text(text: str) -> str:
    """Return what a program says of its error: the end, if it is as parsers of arguments or entry.sh print errors, else
    the last traceback; "" if it says nothing.
    """
    end = bounded(text.rstrip()[-(1 << 16) :])
    last = end.rpartition("\n")[2]
    if _TOLD.match(last):
        return last
    found = _AFTER_USAGE.search(end)
    usage = _USAGE.findall(end, 0, found.start()) if found else []
    if found and usage:
        return f"{usage[-1]}\n{found.group()}"
    traceback, found = last_traceback(text), _BEFORE_HELP.search(end) or _NOT_COMPILED.search(end)
    return traceback if found is None or traceback.endswith(found.group()) else found.group()


def error_line(text: str) -> str:
    """Return the line of `error_text` that names the error; "" if there is none.

    Of chained exceptions it is the last, unless that is only a collective in `finally`, which the others do not join.
    """
    own = error_text(text)
    found = [each for each in raised(own) if not lost(each)] or raised(own)
    if found:
        return found[-1].line.partition("\n")[0]
    refused = _BEFORE_HELP.search(own)
    if refused:
        return refused.group(1) or refused.group(2)
    if _NOT_COMPILED.search(own):
        return own.rpartition("\n")[2]
    refused = _AFTER_USAGE.search(own)
    return " ".join(_FRAME_OF_TYPER.sub("", refused.group() if refused else _REFUSED.sub("", own)).split())


def error(text: str) -> str:
    """Return the error of the program without what differs between attempts; "" if it named none."""
    return normalized(error_line(text))


def normalized(text: str) -> str:
    """Return the text in ASCII, truncated, and without numbers that differ between attempts."""
    return plain(_VARIES.sub("N", text))[:LONGEST].strip()


def plain(text: str) -> str:
    """Return the text as one line of printable ASCII."""
    return "".join(c if c.isprintable() else " " for c in text.encode("ascii", "backslashreplace").decode())


def last_traceback(text: str) -> str:
    """Return the last Python traceback in a text with its chained causes; "" if there is none.

    Those of threads, of destructors and of what only started the ranks count only if there is no other. If the text has
    the ends of several ranks, that of one which did not lose a peer is returned.
    """
    lines = bounded(text).splitlines()
    starts = [i for i, line in enumerate(lines) if line.endswith(TRACEBACK)]
    starts = [i for i in starts if not (i and _ASIDE.search(lines[i - 1]))] or starts
    while len(starts) > 1 and _STARTER.search(_traceback(lines, starts[-1:], "")):
        starts.pop()
    prefixes = [found.group() if found else "" for found in (_PREFIX.match(lines[i]) for i in starts)]
    ranks = sorted(set(prefixes))[:MOST_RANKS] if prefixes and prefixes[-1] else prefixes[-1:]
    ends = [_traceback(lines, [i for i in starts if lines[i].startswith(prefix)], prefix) for prefix in ranks if prefix]
    ends = ends or [_traceback(lines, starts, "") for _ in ranks]
    own = (end for end in ends if len(ends) > 1 and not lost_peer(end))
    return next(own, ends[-1] if ends else "")


def _traceback(lines: list[str], starts: list[int], prefix: str) -> str:
    """Return the last of the tracebacks that start at these lines. prefix: of its rank; other lines are not its own."""
    chain = [starts[-1]]
    for earlier in reversed(starts[:-1]):
        if not any(line.endswith((_CONTEXT, _CAUSE)) for line in lines[earlier : chain[0]]):
            break
        chain.insert(0, earlier)
    last = len(lines)
    if not prefix:  # the message is one line, except NCCL's: what follows may be anything
        last = chain[-1] + 1
        while last < len(lines) and (lines[last].startswith((" ", "\t")) or not lines[last].strip()):
            last += 1
        last += 1
        while last < len(lines) and (_OF_NCCL.match(lines[last]) or lines[last - 1].startswith("Last error:")):
            last += 1
    kept = [line[len(prefix) :] for line in lines[chain[0] : last] if line.startswith(prefix) or not line.strip()]
    return "\n".join(kept).rstrip()


def raised(text: str) -> list[Raised]:
    """Return the exceptions of the last traceback of a text, in the order in which they were raised."""
    parts = re.split("^.*" + re.escape(TRACEBACK) + r"\s*\n", last_traceback(text) + "\n", flags=re.MULTILINE)
    return [_raised(part) for part in parts[1:]]


def _raised(part: str) -> Raised:
    lines = [line for line in part.splitlines() if line.strip() and not line.endswith((_CONTEXT, _CAUSE))]
    start = next((i for i, line in enumerate(lines) if not line.startswith((" ", "\t"))), len(lines))
    words = "\n".join(lines[start:])
    found = _ERROR.fullmatch(words)
    kind, message = (found.group(1), found.group(2) or "") if found else ("", words)
    return Raised(kind, message, tuple(_FRAME.findall("\n".join(lines[:start]))))


def first_raised(text: str) -> Raised | None:
    """Return the exception that led to the others of the last traceback; None without a traceback.

    What `except` and `finally` raise after it is a consequence, as are its translations by libraries.
    """
    chain = raised(text)
    return next((each for each in chain if not _CONTROL.fullmatch(each.kind)), chain[-1] if chain else None)


def lost_peer(text: str) -> bool:
    """Whether the program ended because torch.distributed, gloo or NCCL lost another rank: it is a victim.

    text: its last traceback, or its last lines.
    """
    first = first_raised(text)
    if first is None:  # a thread of C++ ended it
        lines = [line for line in bounded(text).splitlines()[-LINES:] if not _RETRIED.search(line)]
        return any(_LOST.search(line) and _SOURCE.search(line) for line in lines)
    return lost(first)


def lost(error: Raised) -> bool:
    """Whether torch.distributed, gloo or NCCL raised this exception because it lost another rank."""
    origin = _CLASS.fullmatch(error.kind) or _SOURCE.search(error.message)
    return bool(_LOST.search(error.line) and (origin or _MODULE.search("".join(error.files[-1:]))))


def in_collective(text: str) -> bool:
    """Whether the rank was lost during a collective."""
    first = first_raised(text)
    return lost_peer(text) and bool(_COLLECTIVE.search(first.line if first else text))


def lost_connection(text: str) -> bool:
    """The same for any program: whether it may have ended because a peer closed their connection.

    Its own connections cannot be told from those to its peers, except by the clients of known services.
    """
    first = first_raised(text)
    if first is None or lost_peer(text):
        return lost_peer(text)
    return bool(_CLOSED.search(first.line)) and not any(_CLIENT.search(file) for file in first.files)
