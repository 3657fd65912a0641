"""`python -m bench.programs.fanout_pssh SSH_CONFIG COUNT KEY PORT...`: one command a phase with parallel-ssh.

All on one client, which keeps its connections.

Prints what fanout_ours prints. It checks no host key, which it cannot.
"""

from __future__ import annotations

import json
import sys
import time

from pssh.clients import ParallelSSHClient
from pssh.config import HostConfig

from bench.programs.cost import cost

COMMANDS = {"facts": "facts", "start": "docker run -d any true", "stop": "docker rm -f any"}


def main() -> None:
    key, ports = sys.argv[3], [int(port) for port in sys.argv[4:]]
    began = time.monotonic()
    client = ParallelSSHClient(
        ["127.0.0.1"] * len(ports),
        host_config=[HostConfig(port=port, user="bench", private_key=key, num_retries=3) for port in ports],
        pool_size=len(ports),
        allow_agent=False,
    )
    seconds = {}
    for phase, command in COMMANDS.items():
        out = client.run_command(command)
        client.join(out)
        lines = [list(host.stdout) for host in out]
        assert all(host.exit_code == 0 for host in out)
        assert phase != "facts" or all(len(each) > 20 for each in lines)
        seconds[phase] = time.monotonic() - began
        began = time.monotonic()
    print(json.dumps({**seconds, **cost()}))


if __name__ == "__main__":
    main()
