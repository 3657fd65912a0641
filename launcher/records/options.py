"""What is said of a job's arguments before it starts: values that are left out, options that the code spells otherwise.

Only the text of the code is known here, so an option that is not in it is no error: a library may define it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from launcher.job.arguments import argv_of, option_of
from launcher.job.models import Job
from launcher.job.overrides import expand_sweep
from launcher.records.snapshot import CodeListing
from launcher.records.trainer import runs_ours

_PROGRAMS = (".py", ".sh")
_LARGEST = 1 << 20  # bytes of a file that is searched
_OPTION = re.compile(r"--[A-Za-z0-9]+(?:[-_][A-Za-z0-9]+)+")


def notes(job: Job, listing: CodeListing) -> list[str]:
    """Return one line for each such argument; none for the launcher's own trainer, which checks its options."""
    if runs_ours(job, listing.folder, listing.trainer):
        return []
    return [*_without_code(job, listing), *_left_out(job), *_spelled_otherwise(job, listing)]


def _without_code(job: Job, listing: CodeListing) -> Iterator[str]:
    """The program may be in the image, or the launcher was called in another folder than was meant."""
    words = [word for word in job.run.command or () if re.fullmatch(r"\S+\.(py|sh)", word)]
    named = [job.run.module] if job.run.module else words
    if not listing.files and named:
        what = f"{listing.folder} has no file to send, and the job starts {', '.join(named)}"
        yield f"{what}: unless the image has it, set `code`, or call launcher in the folder of the program"


def _left_out(job: Job) -> Iterator[str]:
    written = [job.run.args, *job.sweep, *(node.args for node in job.machines)]
    keys = [key for args in written if isinstance(args, Mapping) for key, value in args.items() if value is False]
    for key in dict.fromkeys(keys):
        yield f"{key}: false is left out: the program is not given {option_of(key)}. To pass the word: {key}: 'false'"


def _spelled_otherwise(job: Job, listing: CodeListing) -> Iterator[str]:
    programs = [argv_of(variant.args_of(node)) for variant in expand_sweep(job) for node in variant.machines]
    words = (word.partition("=")[0] for argv in programs for word in argv)
    wanted = {
        option: {f"--{option[2:].translate(str.maketrans(*change))}" for change in ("-_", "_-")} - {option}
        for option in dict.fromkeys(words)
        if _OPTION.fullmatch(option)
    }
    if not wanted:
        return
    seen: dict[str, str] = {}  # option -> the first file that has it
    for file in listing.files:
        if file.name.endswith(_PROGRAMS) and not file.is_link and file.status.st_size <= _LARGEST:
            with suppress(OSError):  # packing reports it
                for option in _OPTION.findall(Path(file.path).read_text(encoding="utf-8", errors="replace")):
                    seen.setdefault(option, file.name)
    for option, others in wanted.items():
        if option not in seen and (other := next((each for each in sorted(others) if each in seen), None)):
            fix = f"write the key so, as it is: {{{other}: VALUE}}"
            if not isinstance(job.run.args, Mapping):
                fix = "correct run.args"
            yield f"the program is given {option}, and the code has only {other} ({seen[other]}): {fix}"
