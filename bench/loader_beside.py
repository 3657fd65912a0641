"""The trainer's loader compared with that of another checkout: images per CPU-second.

    git worktree add /tmp/other COMMIT && python -m bench.loader_beside /tmp/other [--rounds 30] [--images 256]

Each loader has its own process and the same files. The ratio is the median over rounds; the order changes each round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.loader import make_images

SERVER = Path(__file__).parent / "programs" / "loader_serve.py"
NAMES = ("ours, compiled", "ours, compiled, packed JPEG <= 400 px")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.loader_beside", description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--images", type=int, default=256)
    call = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        root = Path(folder)
        make_images(root / "images", call.images)
        trees = {"this": Path.cwd(), "other": call.tree}
        for name, tree in trees.items():
            pack(tree, root / name, root / "images")
        for loader in NAMES:
            show(loader, [start(tree, root / name, loader) for name, tree in trees.items()], call.rounds)
    return 0


def pack(tree: Path, folder: Path, images: Path) -> None:
    """Pack with the tree's own command, because the format may have changed."""
    folder.mkdir()
    (folder / "images").symlink_to(images)
    for name, options in (("jpeg400", ["--max-side", "400", "--quality", "90"]), ("raw256", ["--raw", "256"])):
        command = [sys.executable, "-m", "train", "pack", str(images), str(folder / f"{name}.pack"), *options]
        environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)


def start(tree: Path, root: Path, loader: str) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, str(SERVER), str(root), loader],
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree.resolve())}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout is not None
    if server.stdout.readline().strip() != "ready":
        raise SystemExit(f"the loader of {tree} did not start")
    return server


def ask(server: subprocess.Popen[str]) -> float:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("\n")
    server.stdin.flush()
    return float(server.stdout.readline())


def show(loader: str, servers: list[subprocess.Popen[str]], rounds: int) -> None:
    rates: list[list[float]] = [[], []]
    for turn in range(rounds):
        for index in (0, 1) if turn % 2 else (1, 0):
            rates[index].append(ask(servers[index]))
    for server in servers:
        server.communicate()
    ratios = [this / other for this, other in zip(*rates, strict=True)]
    this, other = map(statistics.median, rates)
    spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    print(f"{loader}: this checkout {this:.0f}, other {other:.0f}, ratio {spread}, {rounds} rounds", flush=True)


if __name__ == "__main__":
    sys.exit(main())
