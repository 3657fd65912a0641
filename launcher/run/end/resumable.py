"""After a failure: whether a machine had restarted, and how to continue from the checkpoint that is left."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from launcher.container_scripts.words import error_line, raised
from launcher.errors import LauncherError
from launcher.model.host import cluster_name
from launcher.node.engine import Engine
from launcher.node.parallel import run_all_catching
from launcher.records import sweeps
from launcher.records.store import Record
from launcher.run.end.evidence import Evidence
from launcher.run.locate import Attached
from launcher.run.result import Failure
from launcher.run.saved import checkpoint_of

COMMAND = "launcher up JOB --resume RUN"  # in a fix, in place of the run's own
_REFUSED = 2  # with which the trainer, argparse and Python itself refuse what they were started with
_MARGIN = 2.0  # seconds: both times are rounded
# Prints when the machine's first process started: `<boot time, epoch seconds> <1/100 seconds after it>`.
_STARTED = r"""
boot=$(sed -n 's/^btime //p' /proc/stat)
read -r line </proc/1/stat
set -- ${line##*) }
echo "@@started $boot ${20}"
"""


def restarted(attached: Attached, evidence: Sequence[Evidence]) -> Failure | None:
    """Return the failure of a node whose machine has restarted since its container started; None if there is none."""
    if attached.record.traits.one_machine:
        return None
    asked = [each for each in evidence if each.state.exit_code and cluster_name(each.node.host) is None]
    found = run_all_catching([partial(_machine_started, attached.engines[each.node.name]) for each in asked])
    for each, when in zip(asked, found, strict=True):
        began = each.state.started
        if isinstance(when, float) and began and when > began + _MARGIN:
            return Failure(each.node.name, None, each.state.exit_code, "restarted while the run used it", "", "")
    return None


def _machine_started(engine: Engine) -> float:
    """Return when the machine started, by its clock, 0.0 if unknown. Raises NodeUnreachable, NodeUnfit."""
    match = re.search(rb"@@started (\d{1,12}) (\d{1,15})\n", engine.machine.script(_STARTED).out)
    return int(match[1]) + int(match[2]) / 100 if match else 0.0


def command_of(record: Record) -> str:
    """Return the command that continues a run: of a sweep's variant, the one that resumes the sweep. Its job file alone
    would start a run of none.
    """
    return sweeps.resume_command(record, group.group) if (group := record.group) else record.resume_command


def left_to_resume(failure: Failure, attached: Attached) -> str | None:
    """Return the checkpoint that is left and the command that continues from it.

    None if the fix has the command, or if the program was refused before it saved anything: it would be again.
    """
    command = command_of(attached.record)
    if command in failure.cure:
        return None
    names = {error_line(failure.words).partition(":")[0], *(each.kind for each in raised(failure.words))}
    try:
        # A program that could not import everything has saved nothing: it downloaded such a file
        ran = not names & {"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError"}
        checkpoint = checkpoint_of(attached, workdirs=ran, own=failure.exit_code == _REFUSED)
    except LauncherError:
        return None
    where = ", in the folder where it was started" if attached.record.rebuilt else ""
    return f"{checkpoint}: {command}{where}" if checkpoint else None
