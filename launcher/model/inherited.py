"""Variables that a run sets for its program. A run that the program starts inherits them, and must not use them."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "LAUNCHER_"
OF_THE_USER = ("LAUNCHER_SSH_CONFIG", "LAUNCHER_IMAGE_RELAY", "LAUNCHER_BUILD_NETWORK")  # not of a run
# Set by torchrun for a worker. With TORCHELASTIC_USE_AGENT_STORE, rank 0 would wait for a store that nobody opens.
OF_A_RANK = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
)


def without_a_run(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of the run in which this process runs, if any."""
    return {
        name: value
        for name, value in environ.items()
        if name in OF_THE_USER or not (name.startswith(PREFIX) or name in OF_A_RANK)
    }
