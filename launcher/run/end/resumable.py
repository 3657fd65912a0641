"""After a failure: whether a machine had restarted, and how to continue from the checkpoint that is left."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from launcher.container_scripts.words import raised
from launcher.errors import LauncherError
from launcher.model.container import ContainerState
from launcher.model.host import cluster_name
from launcher.node.engine import Engine
from launcher.node.parallel import run_all_settled
from launcher.records.store import NodeOfRun
from launcher.run.end.diagnose import COMMAND
from launcher.run.locate import Attached
from launcher.run.result import Failure
from launcher.run.saved import checkpoint_of

_MARGIN = 2.0  # seconds: both times are rounded
# Prints when the machine's first process started: `<boot time, epoch seconds> <1/100 seconds after it>`.
_STARTED = r"""
boot=$(sed -n 's/^btime //p' /proc/stat)
read -r line </proc/1/stat
set -- ${line##*) }
echo "@@started $boot ${20}"
"""


def restarted(attached: Attached, states: Mapping[str, ContainerState]) -> Failure | None:
    """Return the failure of a node whose machine has restarted since its container started; None if there is none."""
    ended = [node for node in attached.nodes if node.name in states and states[node.name].exit_code]
    asked = [node for node in ended if cluster_name(node.host) is None and not attached.record.traits.one_machine]
    found = run_all_settled([partial(_machine_started, attached.engines[node.name]) for node in asked])
    for node, when in zip(asked, found, strict=True):
        began = states[node.name].started
        if isinstance(when, float) and began and when > began + _MARGIN:
            return _restarted(node, states[node.name])
    return None


def _restarted(node: NodeOfRun, state: ContainerState) -> Failure:
    return Failure(node.name, None, state.exit_code, "restarted while the run used it", "", "")


def _machine_started(engine: Engine) -> float:
    """Return when the machine started, by its clock, 0.0 if unknown. Raises NodeUnreachable, NodeUnfit."""
    match = re.search(rb"@@started (\d{1,12}) (\d{1,15})\n", engine.machine.script(_STARTED).out)
    return int(match[1]) + int(match[2]) / 100 if match else 0.0


def continued(failure: Failure, attached: Attached) -> tuple[Failure, str | None]:
    """Return the failure with the command in its fix, and what to continue from with which command, if not there."""
    command = attached.record.resume_command
    if COMMAND in failure.cure:
        return replace(failure, cure=failure.cure.replace(COMMAND, command)), None
    names = {each.kind for each in raised(failure.words)}
    try:
        # A program that could not import everything has saved nothing: it downloaded such a file
        checkpoint = checkpoint_of(attached, workdirs=not names & {"ImportError", "ModuleNotFoundError", "SyntaxError"})
    except LauncherError:
        return failure, None
    return failure, f"{checkpoint}: {command}" if checkpoint else None
