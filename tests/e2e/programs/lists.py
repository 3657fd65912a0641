"""Print every file and link below the working directory as JSON: path, type and content digest."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path


def tree(folder: Path) -> dict[str, list[object]]:
    """Return {path: ["link", target] or ["file", is executable, digest]}, without the records in runs/."""
    found: dict[str, list[object]] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ["link", os.readlink(path)]  # noqa: PTH115 - Path.readlink removes ./ and //
        elif path.is_file() and not name.startswith("runs/"):
            found[name] = ["file", os.access(path, os.X_OK), hashlib.sha256(path.read_bytes()).hexdigest()]
    return found


if __name__ == "__main__":
    print(json.dumps(tree(Path())))
