"""The code of a run: which files have been imported besides the standard library and installed packages."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

INSTALLED = ("site-packages", "dist-packages")
DIGITS = 16  # of each digest: enough for files that nobody forges
SHOWN = 3  # names in a message


def loaded(program: bool = False) -> dict[str, str]:
    """Return digests of the Python files of all modules, by their names: the user's, and the trainer's own.

    Compiled modules are left out: two machines never build the same bytes. `program`: also the one that was started,
    which may differ in a resumed run (python -m train or a script that calls it) and in a guarded worker.
    """
    found = {}
    for name, module in sorted(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        if name == "__mp_main__" or (name == "__main__" and not program):
            continue
        if path.suffix != ".py" or (name.partition(".")[0] != "train" and is_installed(path)):
            continue
        try:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]
        except OSError:  # it was removed since, or is in an archive
            continue
    return found


def is_installed(file: str | Path) -> bool:
    """Whether a file is of the standard library or an installed package."""
    path, paths = Path(file), sysconfig.get_paths()
    library = {Path(paths[name]) for name in ("stdlib", "platstdlib")}
    return bool(library.intersection(path.parents)) or any(part in INSTALLED for part in path.parts)


def changed(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return the modules whose files differ, with the file of the first, or "".

    Modules that only one side has do not count: rank 0 alone writes files, and what imports them is compared.
    """
    names = [name for name, value in mine.items() if theirs.get(name, value) != value]
    if not names:
        return ""
    first = f"{names[0]} ({getattr(sys.modules.get(names[0]), '__file__', 'no file')})"
    return ", ".join([first, *names[1:SHOWN], *(["..."] if len(names) > SHOWN else [])])
