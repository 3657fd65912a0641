"""Reaching machines: the Engine seam and its three implementations, ssh, facts."""

import sys

# paramiko tries to import invoke, for the `Match exec` of its own reader of ssh configs, which we do not use: OpenSSH
# resolves every alias. With asyncio and unittest.mock behind it that is 0.1 s of every start.
sys.modules.setdefault("invoke", None)  # type: ignore[arg-type] # None is Python's own mark for "do not import"
