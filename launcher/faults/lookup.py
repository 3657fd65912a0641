"""Finds the rule of the table that applies to a text. If none applies, nothing is known, and nothing is said."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from launcher.container_scripts.words import Raised, bounded, error_text, first_raised, lost, raised
from launcher.faults.cause import Cause
from launcher.faults.table import CUDA, IMPORT, LAST_RESORT, METADATA, NCCL, NVML, RULES, Origin

_NOTHING: Mapping[str, str] = MappingProxyType({})
_LAST = 3  # lines in which a program without a traceback, or what it starts, says why it ends
_OF_CPP = re.compile(r"terminate called|what\(\): |terminated with exception: |Fatal Python error: ")


def cause_of_report(origin: Origin, text: str, known: Mapping[str, str] = _NOTHING) -> Cause | None:
    """Return the cause of an error that the container engine (ENGINE) or nvidia-smi (SMI) reported to the launcher."""
    text = bounded(text)
    found = (rule.cause(text, "", known) for rule in RULES if origin in rule.origins)
    return next((cause for cause in found if cause), None)


def cause_of_output(message: str, log: str, known: Mapping[str, str]) -> Cause | None:
    """Return the cause of the end of a user's program.

    message: its traceback, or the end of its log. log: more of its log, in which CUDA and NCCL print more than the
    exception has; read only if the exception is theirs, or if C++ ended the program. known: the `node`, the exit
    `code`, the `port` of the rendezvous, the `place` of the libraries (IMAGE or NODE), the `output` folder as the
    program sees it and `memlock` (UNLIMITED), as far as they are known.
    """
    message, log = bounded(message), bounded(log)
    first = first_raised(message)
    errors = [error for error in raised(message) if error == first or not lost(error)]  # that would be a consequence
    errors = [error for error in errors if error == errors[-1] or not _was_replaced(error, errors[-1])]
    end = [] if errors else message.splitlines()
    last = end if error_text(message) else [line for line in end if line.strip()][-_LAST:]  # before that, it went on
    by_gpus = any(origin.raised(error) for origin in (CUDA, NVML, NCCL) for error in errors)
    more = log.splitlines() if by_gpus or (not errors and _OF_CPP.search(log)) else []
    code = int(known["code"]) if "code" in known else None
    origins = {origin for rule in (*RULES, LAST_RESORT) for origin in rule.origins}
    printed = {
        origin: [line for line in ((*end, *more) if origin.anywhere else last) if origin.printed(line, code)]
        for origin in origins
    }
    for rules in (RULES, (LAST_RESORT,)):
        for error in errors:
            for rule in rules:
                if any(origin.raised(error) for origin in rule.origins) and (c := rule.cause(error.line, log, known)):
                    return c
        for rule in rules:
            for line in (line for origin in rule.origins for line in printed[origin]):
                if cause := rule.cause(line, log, known):
                    return cause
    return None


def _was_replaced(error: Raised, last: Raised) -> bool:
    """Whether a program does without what it could not import (`except ImportError:`), unless the last error names it.

    Then the last error is that of the replacement, or of anything else.
    """
    if not any(origin.raised(error) for origin in (IMPORT, METADATA)):
        return False
    name = error.message.rpartition(" ")[2].strip("'").replace("-", "_")
    return name not in last.message.replace("-", "_")
