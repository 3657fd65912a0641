"""The code as one more layer of the job's image, and the push to a registry: what Kubernetes runs."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable
from typing import TYPE_CHECKING

from launcher.errors import UsageError
from launcher.image.distribution import registry_login
from launcher.image.image_locations import Log
from launcher.image.names import JOB, OURS, Reference, parse
from launcher.model.container import CODE
from launcher.model.facts import ImageInfo

if TYPE_CHECKING:
    from launcher.node.docker.images import DockerImages

IN_CONTEXT = "code"  # the folder of the build context that becomes CODE
Members = Iterable[tuple[tarfile.TarInfo, bytes | None]]


def add_code(
    store: DockerImages, base: ImageInfo, job: str, digest: str, members: Members, log: Log
) -> tuple[str, ImageInfo]:
    """An image like `base` with the code in its working directory, CODE; its name. members: below IN_CONTEXT."""
    own = f"{OURS}base:{base.id.partition(':')[2][:24]}"  # builders look up an id or a digest in a registry
    name = f"{OURS}{job}-code:{hashlib.sha256(f'{base.id} {digest}'.encode()).hexdigest()[:24]}"
    steps = f"FROM {own}\nCOPY {IN_CONTEXT} {CODE}\nWORKDIR {CODE}\n".encode()
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w", format=tarfile.PAX_FORMAT) as tar:
        dockerfile = tarfile.TarInfo("Dockerfile")
        dockerfile.size = len(steps)
        tar.addfile(dockerfile, io.BytesIO(steps))
        for member, content in members:
            tar.addfile(member, io.BytesIO(content) if content is not None else None)
    store.tag(base.id, own)
    try:
        store.build(context.getvalue(), tag=name, arguments={}, labels={JOB: job}, network="", say=log)
    finally:
        if base.tags or base.repo_digests:  # otherwise this name is all that keeps the base
            store.remove(own)
    built = store.inspect(name)
    assert built is not None  # the builder has just named it so
    return name, built


def target(registry: str, job: str) -> Reference:
    """Where the job's image goes. Raises UsageError for what is no place in a registry."""
    found = parse(f"{registry}/{job}")
    if found is None or found.tag or found.digest:
        raise UsageError("--push", f"{registry} is no place in a registry", "such as registry.example/team")
    return found


def publish(store: DockerImages, image: ImageInfo, to: Reference) -> str:
    """Push it; what it is called there, by digest."""
    name = f"{to.repository}:{image.id.partition(':')[2][:24]}"
    store.tag(image.id, name)
    return to.at(store.push(name, registry_login(to)))
