"""`python -m bench.programs.fanout_shell SSH_CONFIG COUNT WIDTH`: a shell loop with ssh, WIDTH at once by xargs -P.

Prints what fanout_ours prints; of the processor time Python's own part is 0.02 s.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from bench.programs.cost import cost

COMMANDS = {"facts": "facts", "start": "docker run -d any true", "stop": "docker rm -f any"}


def main() -> None:
    config, count, width = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    hosts = "\n".join(f"n{place}" for place in range(count))
    seconds = {}
    for phase, command in COMMANDS.items():
        began = time.monotonic()
        argv = ["xargs", "-P", width, "-I{}", "ssh", "-F", config, "-o", "BatchMode=yes", "{}", command]
        done = subprocess.run(argv, input=hosts, capture_output=True, text=True, check=True)
        assert phase != "facts" or done.stdout.count("@@end") == count
        seconds[phase] = time.monotonic() - began
    print(json.dumps({**seconds, **cost()}))


if __name__ == "__main__":
    main()
