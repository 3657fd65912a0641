"""A sweep on a cluster is one job array: its variants, all submitted, are shown one after another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from launcher.cli.console import Screen
from launcher.cli.foreground import follow, stop_now
from launcher.cli.reporter import Reporter
from launcher.errors import LauncherError, RunUnknown, StoppedByUser
from launcher.job.settings import read_settings
from launcher.model.plan import RunId
from launcher.node import output_folder
from launcher.run.locate import attach
from launcher.run.stop import stop


def show_array(runs: Sequence[RunId], ssh_config: Path | None, *, raw: bool) -> int:
    """Show every run until it ends; the worst exit code. Leaving one leaves all, stopping one stops the rest."""
    notify, log = read_settings(os.environ).notify, Reporter().log
    code = 0
    for run in runs:
        with attach(run, None, ssh_config, log) as attached, Screen(attached.record.mask, raw=raw) as screen:
            if code == StoppedByUser.exit_code:
                stop_now(attached, screen)
                continue
            ended = follow(attached, screen, notify, resumed=True)
        if ended is None:
            log("the other variants go on as well: launcher runs")
            return 0
        code = max(code, ended)
    return code


def undo(runs: Sequence[RunId], cause: BaseException, ssh_config: Path | None) -> None:
    """Remove the variants of an array that was not submitted, as far as they were created."""
    code = cause.exit_code if isinstance(cause, LauncherError) else StoppedByUser.exit_code
    for run in runs:
        with suppress(RunUnknown), attach(run, None, ssh_config, Reporter().log) as attached:
            stop(attached.fleet, run)
            master = attached.nodes[0]
            output_folder.remove(attached.engines[master.name].files, master.output, run)
            attached.record.finish({"run": run, "state": "failed", "exit_code": code, "why": str(cause)})
