"""`python -m tests.slurm up|down`: start or stop the Slurm bed manually."""

from __future__ import annotations

import sys

from tests.bed.settings import BedUnavailable
from tests.slurm.bed import SlurmBed

if __name__ == "__main__":
    bed = SlurmBed.from_environment()
    try:
        bed.up() if sys.argv[1:] == ["up"] else bed.down()
    except BedUnavailable as error:
        sys.exit(str(error))
    print(f"export SLURM_CONF={bed.config}" if sys.argv[1:] == ["up"] else "down")
