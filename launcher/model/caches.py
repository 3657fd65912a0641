"""Names of the folders that outlive containers: ~/.launcher/cache/IMAGE-MACHINE, and cache/models.

IMAGE: of the image's ID, as compiled code depends on its libraries. MACHINE: of the machine's ID, as it depends on the
processor, and several machines may share a home.
"""

from __future__ import annotations

import re

FOLDER = "cache"  # in ~/.launcher
MODELS = "models"
LENGTH = 12  # characters of both IDs
NAME = re.compile(f"(?P<image>[0-9a-z]{{1,{LENGTH}}})-(?P<machine>[0-9a-z]{{1,{LENGTH}}})|{MODELS}")


def name(image: str, machine: str) -> str:
    """Return the name of the folder for the code of an image on a machine, by their IDs."""
    return f"{short(image.rpartition(':')[2])}-{short(machine)}"


def short(identity: str) -> str:
    return re.sub("[^0-9a-z]", "", identity.lower())[:LENGTH] or "0"
