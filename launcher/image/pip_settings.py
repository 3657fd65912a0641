"""The caller's own pip settings that a build must share to reach the same package index. Never a password."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from launcher.errors import ImageBuildFailed

VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST")


def index(environment: Mapping[str, str] = os.environ) -> tuple[tuple[str, str], ...]:
    """What the caller's environment says about pip's index.

    Raises ImageBuildFailed for an address with a password in it: it would stay readable in the image's history.
    """
    found = []
    for name in VARIABLES:
        value = environment.get(name, "").strip()
        if not value:
            continue
        if any(urlsplit(address).password for address in value.split()):
            raise ImageBuildFailed(
                f"environment variable {name}",
                "has a password in it, which everybody who has the image could read",
                "use an index that needs none, or build the image elsewhere and give it as image.ref",
            )
        found.append((name, value))
    return tuple(found)


def authority(environment: Mapping[str, str] = os.environ) -> str:
    """The certificates that the caller's pip trusts (PIP_CERT), "" for pip's own."""
    path = environment.get("PIP_CERT", "").strip()
    if not path:
        return ""
    try:
        return Path(path).read_text(encoding="ascii", errors="ignore")
    except OSError as error:
        raise ImageBuildFailed(
            "environment variable PIP_CERT", f"{path} cannot be read: {error.strerror}", "correct or unset it"
        ) from error
