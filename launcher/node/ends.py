"""What `launcher status` reads of a node: the ends of its files, and how busy its machine is, in one round trip."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from launcher.elastic.generations import GENERATIONS
from launcher.node.machine import Machine
from launcher.node.opened import BELOW, bounded, relative

TAIL = 8192  # bytes from the end of a log or of the metrics
ATTEMPTS = 1 << 20  # bytes from the end of the attempts
NCCL_MOST = 65536  # bytes of NCCL's log of each process
GROUPS = 1 << 18  # bytes from the end of the file of process groups
LIMIT = 20.0  # seconds for the query of one node
_NCCL = "Using network|NET/|NCCL_IB|libibverbs"  # lines that run.end.gradients needs
# $1: a random separator before each part, which no program prints. $2: the output folder, and in it $3: log,
# $4: attempts, $5: metrics, or "" (with min_nodes: those of the newest generation); $6: "" if the run has ended;
# $7: logs/NODE; $8: the file of process groups.
_SCRIPT = f"""{BELOW}
LC_ALL=C
export LC_ALL
at "$2"
echo "$1"; below "$3" tail -c {TAIL} 2>/dev/null
echo; echo "$1"; below "$4" tail -c {ATTEMPTS} 2>/dev/null
metrics=$5
if [ -n "$metrics" ]; then
  for one in "$root"/{GENERATIONS}/*/metrics.jsonl; do [ ! -f "$one" ] || metrics=${{one#"$root/"}}; done
fi
echo; echo "$1"; below "$metrics" tail -c {TAIL} 2>/dev/null
echo; echo "$1"; below "$3" true 2>&1 | grep "Permission denied"
echo; echo "$1"; below "$8" tail -c {GROUPS} 2>/dev/null
echo; echo "$1"
[ -n "$6" ] || exit 0
for one in "$root/$7".nccl.*; do # of this start of the processes: the program changes neither file later
  if [ "$one" -nt "$root/$4" ]; then below "${{one#"$root/"}}" grep -aE '{_NCCL}' | head -c {NCCL_MOST}; fi
done 2>/dev/null
echo; echo "$1"
grep -E '^Mem(Total|Available):' /proc/meminfo
command -v nvidia-smi >/dev/null || exit 0
set -- nvidia-smi --query-gpu=uuid,utilization.gpu,memory.used,memory.total --format=csv,noheader,nounits
if command -v timeout >/dev/null; then timeout -s KILL 10 "$@"; else "$@"; fi
"""


@dataclass(frozen=True)
class EndsWanted:
    """Files of a node, by their paths. metrics: "" if it has none. runs: whether its processes may run.

    groups: of its process groups.
    """

    log: str
    attempts: str
    metrics: str
    runs: bool
    groups: str = ""


@dataclass(frozen=True)
class Ends:
    """Ends of a node's files. denied: why the log is not readable. machine: memory and GPUs; None: not queried.

    nccl: lines of NCCL's logs. groups: of run.membership.
    """

    log: bytes = b""
    attempts: bytes = b""
    metrics: bytes = b""
    denied: bytes = b""
    machine: bytes | None = None
    nccl: bytes = b""
    groups: bytes = b""


def read(machine: Machine, output: str, wanted: EndsWanted) -> Ends:
    """Raises NodeUnreachable, NodeUnfit. output: the folder that contains the files."""
    mark, runs = secrets.token_hex(16), "yes" if wanted.runs else ""
    log, attempts = relative(wanted.log, output), relative(wanted.attempts, output)
    metrics, groups = (relative(path, output) if path else "" for path in (wanted.metrics, wanted.groups))
    arguments = (mark, output, log, attempts, metrics, runs, log.removesuffix(".log"), groups)
    printed = machine.run(bounded(LIMIT, _SCRIPT, *arguments)).out
    log_end, tried, measured, denied, joined, nccl, use = [*printed.split(f"{mark}\n".encode()), *[b""] * 7][1:8]
    return Ends(log_end, tried, measured, denied, use if runs else None, nccl, joined)
