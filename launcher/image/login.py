"""The caller's own registry login, for the one request that needs it; it is never stored on a node."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.errors import ImageUnfit
from launcher.image import reference


def login_for(name: str) -> Mapping[str, str] | None:
    """What `docker login` on this machine knows for the image's registry; None where it knows nothing.

    Reads the Docker CLI's config.json and its credential helpers. Raises ImageUnfit where a helper fails.
    """
    wanted = reference.parse(name)
    if wanted is None:
        return None
    from docker import auth  # slow to load, and most jobs pull nothing
    from docker.errors import DockerException

    try:
        found = auth.load_config().resolve_authconfig(wanted.registry or None)
    except DockerException as error:
        raise ImageUnfit(
            f"image {name}",
            f"this machine's Docker login for {wanted.registry or 'Docker Hub'} cannot be read: {error}",
            "check credsStore and credHelpers in ~/.docker/config.json",
        ) from error
    if not found:
        return None
    return {str(key): str(value) for key, value in found.items() if value}
