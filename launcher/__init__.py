"""One file and one command: PyTorch training in containers on machines that have only sshd and Docker.

The public interface: `load`, `plan`, `up`, `find`, `Run`, `Outcome` and the module `errors`; see docs/api.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher import errors
    from launcher.api.jobs import load, plan
    from launcher.api.run import Run, find
    from launcher.api.up import up
    from launcher.run.result import Outcome

__version__ = "0.1.0"
__all__ = ["Outcome", "Run", "errors", "find", "load", "plan", "up"]
_MODULES = {
    "load": "launcher.api.jobs",
    "plan": "launcher.api.jobs",
    "up": "launcher.api.up",
    "find": "launcher.api.run",
    "Run": "launcher.api.run",
    "Outcome": "launcher.run.result",
}


def __getattr__(name: str) -> Any:
    """Import a name's module on first use, so that `import launcher` is fast."""
    if name == "errors":
        return importlib.import_module("launcher.errors")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
