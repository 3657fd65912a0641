"""python3 - IMAGE BUNDLE WORKDIR SOURCE:TARGET[:OPTION]... <oci_bundle.py: the bundle of one job, made of its image's.

Runs on a node of the cluster, with the Python 3.6 or newer that is there. The bundle binds the image's folders, which
stay read-only, and the job's. Its `env` has the image's variables as lines for a shell.
"""

import json
import os
import shlex
import sys
from typing import Any


def write(image: str, bundle: str, workdir: str, *places: str) -> None:
    with open(f"{image}/config.json") as file:
        config = json.load(file)
    # Older Slurm accepts only the bundle's own rootfs, so the image's folders are mounted there.
    config["root"] = {"path": "rootfs", "readonly": True}
    config["process"]["cwd"] = workdir
    config["linux"].pop("resources", None)  # Slurm's own limits count
    config["linux"]["namespaces"] = [n for n in config["linux"]["namespaces"] if n["type"] not in ("network", "ipc")]
    mounts = [m for m in config["mounts"] if not m["destination"].startswith("/dev")]
    for place in places:
        source, target, *options = place.split(":")
        mounts.append(bind(source, target, *options))
        there = os.path.realpath(f"{image}/rootfs{target}")
        if os.path.isdir(source) and there.startswith(image):
            os.makedirs(there, exist_ok=True)  # where it is mounted, in an image that is read-only
    os.makedirs(f"{bundle}/rootfs", exist_ok=True)
    for entry in os.scandir(f"{image}/rootfs"):
        if not entry.is_symlink() and entry.name not in ("dev", "proc", "sys"):
            mounts.insert(0, bind(entry.path, f"/{entry.name}", "ro"))
        elif entry.is_symlink() and not os.path.lexists(f"{bundle}/rootfs/{entry.name}"):
            os.symlink(os.readlink(entry.path), f"{bundle}/rootfs/{entry.name}")
    config["mounts"] = mounts
    with open(f"{bundle}/config.json", "w") as file:
        json.dump(config, file)
    with open(f"{bundle}/env", "w") as file:  # older Slurm lets the caller's variables win
        file.writelines(f"export {shlex.quote(setting)}\n" for setting in config["process"]["env"])


def bind(source: str, at: str, *options: str) -> Any:
    return {"destination": at, "type": "bind", "source": source, "options": ["rbind", *options]}


if __name__ == "__main__":
    write(*sys.argv[1:])
