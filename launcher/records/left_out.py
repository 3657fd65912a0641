"""What of a folder is not among its code files, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

IGNORE_FILES = (".gitignore", ".dockerignore")  # .dockerignore only at the top

# Why something is left out; runs/ID/left_out.json has these texts
EXCLUDED = "excluded by "  # FILE:LINE
NEVER = "it is never sent"
CREDENTIALS = "it may contain credentials"
ENVIRONMENT = "it is a virtual environment"
REPORT = "it is an archive of launcher report"
EMPTY = "nothing in it is sent"


@dataclass
class LeftOut:
    """What is in a folder and not among its code files. A folder that is left out as a whole is one entry."""

    why: dict[str, str] = field(default_factory=dict)  # by path from the folder; a folder's ends with /
    git_error: str = ""  # why git could not list the tracked files

    def lines(self) -> list[str]:
        """Return FILE:LINE for each entry that an ignore file excludes."""
        return [why[len(EXCLUDED) :] for why in self.why.values() if why.startswith(EXCLUDED)]

    def ignore_files(self) -> list[str]:
        """Return the ignore file for each entry that one excludes: those of folders by their name alone."""
        files = [line.rpartition(":")[0] for line in self.lines()]
        return [name if (name := file.rpartition("/")[2]) in IGNORE_FILES else file for file in files]

    def entry(self, path: str) -> str:
        """Return the entry that a path is, or is in; "" if there is none."""
        while path:
            for each in (path, f"{path}/"):
                if each in self.why:
                    return each
            path = path.rpartition("/")[0]
        return ""
