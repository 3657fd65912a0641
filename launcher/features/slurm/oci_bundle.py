"""python3 - IMAGE BUNDLE WORKDIR SOURCE:TARGET[:OPTION]... <oci_bundle.py: create a job's bundle from the image's.

Runs on a node of the cluster, with its Python (3.6 or later). The bundle binds the image's folders read-only, and the
job's folders. Its file `env` has the image's variables as shell lines.
"""

import json
import os
import shlex
import sys
from typing import Any


def write(image: str, bundle: str, workdir: str, *mounted: str) -> None:
    with open(f"{image}/config.json") as file:
        config = json.load(file)
    # Older Slurm accepts only the bundle's own rootfs, so the image's folders are mounted there.
    config["root"] = {"path": "rootfs", "readonly": True}
    config["process"]["cwd"] = workdir
    config["linux"].pop("resources", None)  # Slurm's limits apply
    config["linux"]["namespaces"] = [n for n in config["linux"]["namespaces"] if n["type"] not in ("network", "ipc")]
    mounts = [m for m in config["mounts"] if not m["destination"].startswith("/dev")]
    for mount in mounted:
        source, target, *options = mount.split(":")
        mounts.append(bind(source, target, *options))
        mount_point = os.path.realpath(f"{image}/rootfs{target}")
        if os.path.isdir(source) and mount_point.startswith(image):
            os.makedirs(mount_point, exist_ok=True)  # the image is read-only in the container
    os.makedirs(f"{bundle}/rootfs", exist_ok=True)
    for entry in os.scandir(f"{image}/rootfs"):
        if not entry.is_symlink() and entry.name not in ("dev", "proc", "sys"):
            mounts.insert(0, bind(entry.path, f"/{entry.name}", "ro"))
        elif entry.is_symlink() and not os.path.lexists(f"{bundle}/rootfs/{entry.name}"):
            os.symlink(os.readlink(entry.path), f"{bundle}/rootfs/{entry.name}")
    config["mounts"] = mounts
    with open(f"{bundle}/config.json", "w") as file:
        json.dump(config, file)
    with open(f"{bundle}/env", "w") as file:  # in older Slurm, the caller's variables override the image's
        file.writelines(f"export {shlex.quote(setting)}\n" for setting in config["process"]["env"])


def bind(source: str, at: str, *options: str) -> Any:
    return {"destination": at, "type": "bind", "source": source, "options": ["rbind", *options]}


if __name__ == "__main__":
    write(*sys.argv[1:])
