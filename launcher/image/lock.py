"""The lock file next to a job file: the base image, its repair and the built image.

It makes a job reproducible even if the base's tag moves. It is rewritten if it is missing, or if base, torchvision or
packages in the job file have changed.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import JobInvalid
from launcher.job.parts import Image
from launcher.local_files import write_atomic

FORMAT = 1


@dataclass(frozen=True)
class Lock:
    """base_digest: digest of the base in its registry; "" if it came from none, then `base_id` pins it."""

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
    notes: tuple[str, ...] = ()  # unusual findings in the base that are not faults
    decoder: bool = False  # whether the trainer's decoder is compiled in it
    format: int = FORMAT

    def fits(self, image: Image) -> bool:
        """Whether the job file still matches the lock."""
        asked = (image.base, image.torchvision, tuple(image.packages))
        return asked == (self.base, self.torchvision_asked, self.packages)


def lock_path(job_file: Path) -> Path:
    """`jobs/x.yaml` -> `jobs/x.lock.json`."""
    return job_file.with_suffix(".lock.json")


def read(path: Path) -> Lock | None:
    """Read a lock file; return None if it does not exist. Raises JobInvalid for a file that is not a lock file."""
    fix = "remove it: the next start writes a new one"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        locked = Lock(**{**found, "packages": tuple(found["packages"]), "notes": tuple(found.get("notes", ()))})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise JobInvalid(str(path), f"is not a lock file of this launcher: {error}", fix) from error
    if locked.format != FORMAT:
        raise JobInvalid(str(path), f"has format {locked.format}, this launcher writes {FORMAT}", fix)
    return locked


def write(path: Path, lock: Lock) -> None:
    """Write the lock file if its content has changed. Raises JobInvalid if the folder is not writable."""
    text = json.dumps(dataclasses.asdict(lock), indent=2) + "\n"
    try:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomic(path, text.encode())
    except OSError as error:
        fix = "check free space and permissions of the job's folder"
        raise JobInvalid(str(path), f"cannot be written: {error.strerror}", fix) from error
