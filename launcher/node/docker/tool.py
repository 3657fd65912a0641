"""Command lines of docker: a script in a container of an image, which sees nothing but its mounts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.model import labels


def tool(
    image: str,
    script: Sequence[str],
    *,
    purpose: str,
    user: str,
    network: str,
    mounts: Iterable[str],
    options: Sequence[str] = (),
) -> list[str]:
    """Return the command, which removes the container at its end.

    script: text for sh, and its $0, $1, ... user: UID:GID of the engine's machine. mounts: as `csv` returns them.
    """
    argv = ["docker", "run", "--rm", "--init", "--log-driver", "none", "--read-only", "--network", network]
    # userns only matters to engines with userns-remap, which forbid the host's network and change the users otherwise
    argv += ["--userns", "host", "--user", user, "--security-opt", "label=disable"]
    argv += ["--label", f"{labels.PURPOSE}={purpose}", *options]
    argv += [argument for mount in mounts for argument in ("--mount", mount)]
    return [*argv, "--entrypoint", "sh", image, "-c", *script]


def csv(*fields: str) -> str:
    """Return comma-separated values as docker's command line reads them."""
    return ",".join('"' + text.replace('"', '""') + '"' if {*text} & {*',"'} else text for text in fields)


def bind(source: str, target: str, *more: str, read_only: bool) -> str:
    """Return a value of --mount."""
    return csv("type=bind", f"source={source}", f"target={target}", *(["readonly"] if read_only else []), *more)
