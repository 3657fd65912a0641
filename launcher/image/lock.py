"""The lock file beside a job: which image its `base` was, what was done to it, and what came of it.

With it the same job file means the same image tomorrow, also after the base's tag has moved; without it, or with
another base, torchvision or packages in the job file, it is written anew.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import JobInvalid
from launcher.job.models import Image

FORMAT = 1


@dataclass(frozen=True)
class Lock:
    """`base_digest`: what its registry calls it, "" for a base that came from none; then `base_id` is the pin."""

    base: str
    torchvision_asked: str
    packages: tuple[str, ...]
    base_id: str
    base_digest: str
    user: str
    torch: str
    torchvision: str
    step: str
    why: str
    image: str
    image_id: str
    notes: tuple[str, ...] = ()  # what is unusual about the base and yet no fault
    format: int = FORMAT

    def fits(self, image: Image) -> bool:
        """Whether the job file still asks for what was locked."""
        asked = (image.base, image.torchvision, tuple(image.packages))
        return asked == (self.base, self.torchvision_asked, self.packages)


def path_beside(job_file: Path) -> Path:
    """`jobs/x.yaml` -> `jobs/x.lock.json`."""
    return job_file.with_suffix(".lock.json")


def read(path: Path) -> Lock | None:
    """None where there is none. Raises JobInvalid for a file that is not one."""
    cure = "remove it: it is written anew"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        locked = Lock(**{**found, "packages": tuple(found["packages"]), "notes": tuple(found.get("notes", ()))})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise JobInvalid(str(path), f"is no lock file of this launcher: {error}", cure) from error
    if locked.format != FORMAT:
        raise JobInvalid(str(path), f"has format {locked.format}, this launcher writes {FORMAT}", cure)
    return locked


def write(path: Path, lock: Lock) -> None:
    """Whole or not at all; an unchanged one is not touched. Raises JobInvalid where the folder cannot be written."""
    text = json.dumps(dataclasses.asdict(lock), indent=2) + "\n"
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if path.exists() and path.read_text(encoding="utf-8") == text:
            return
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise JobInvalid(str(path), f"cannot be written: {error.strerror}", "make the job's folder writable") from error
