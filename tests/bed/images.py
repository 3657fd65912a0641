"""The bed's three images on this machine's engine: base (built without a registry), node and training image."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from tests.bed.archive import debian_archive
from tests.bed.host import docker
from tests.bed.settings import BASE_SUITE, NODE_IMAGE, NODE_SUITE, TRAIN_IMAGE, BedUnavailable, Settings
from tests.bed.shell import CommandFailed, run, succeeds

FOLDER = Path(__file__).parent
INCLUDE = "python3,python3-venv,python3-pip,ca-certificates"
NEWER_INCLUDE = "ca-certificates,docker-cli"  # since Debian 13 the `docker` command is a package of its own
CONTENT = "launcher-bed.content"  # label: digest of the image's inputs


def image_id(reference: str) -> str | None:
    """The id of a local image, or None."""
    done = run(["docker", "image", "inspect", "--format", "{{.Id}}", reference], check=False)
    return done.stdout.strip() or None


def ensure(settings: Settings) -> None:
    """Makes sure that all images exist and are up to date. Raises BedUnavailable, CommandFailed."""
    _build(NODE_IMAGE, "node.Dockerfile", ["node-start.sh", "bed-dockerd.sh"], base_image(settings, NODE_SUITE))
    _build(TRAIN_IMAGE, "train.Dockerfile", [], base_image(settings, BASE_SUITE))


def base_tarball(settings: Settings, suite: str = BASE_SUITE) -> Path:
    """The cached root file system of the base image."""
    return settings.cache / f"{suite}-{hashlib.sha256(_include(suite).encode()).hexdigest()[:8]}.tar"


def _include(suite: str) -> str:
    return INCLUDE if suite == BASE_SUITE else NEWER_INCLUDE


def base_image(settings: Settings, suite: str) -> str:
    """The tag of a Debian; made from the cached tarball, else by debootstrap, else pulled. Raises BedUnavailable."""
    tag = f"debian:{suite}-slim"
    if image_id(tag) is not None:
        return tag
    tarball = base_tarball(settings, suite)
    if not tarball.exists():
        if os.geteuid() != 0 or not shutil.which("debootstrap", path=os.environ.get("PATH", "") + ":/usr/sbin"):
            if not succeeds(["docker", "pull", "-q", tag], timeout=120):
                raise BedUnavailable(
                    f"no {tag} here, no registry to pull it from, and only root with debootstrap can build it"
                )
            return tag
        _bootstrap(tarball, suite)
    docker("import", "--change", 'CMD ["bash"]', str(tarball), tag)
    return tag


def _bootstrap(tarball: Path, suite: str) -> None:
    """A minimal Debian as a tarball, without apt's downloads and the documentation (a third of the size)."""
    archive = debian_archive()
    tarball.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rootfs-", dir=tarball.parent) as folder:
        root = Path(folder) / "root"
        keyring = ["--keyring", archive.signed_by] if archive.signed_by else []
        argv = [
            "debootstrap",
            "--variant=minbase",
            f"--include={_include(suite)}",
            *keyring,
            suite,
            str(root),
            archive.uri,
            *([] if suite == BASE_SUITE else ["sid"]),  # the script, for a suite that debootstrap does not know yet
        ]
        run(argv, timeout=900)
        # Lists of testing expire after a week, which a copy of the archive may be behind.
        (root / "etc/apt/apt.conf.d/80-copies").write_text('Acquire::Check-Valid-Until "false";\n')
        leave_out = (
            "./var/cache/apt/*",
            "./var/lib/apt/lists/*",
            "./usr/share/doc/*",
            "./usr/share/man/*",
            "./usr/share/locale/*",
        )
        exclude = [f"--exclude={pattern}" for pattern in leave_out]
        partial = tarball.with_suffix(".partial")
        run(["tar", "-C", str(root), *exclude, "-cf", str(partial), "."])
        partial.rename(tarball)  # atomic, in case this process is killed


def _build(tag: str, dockerfile: str, files: list[str], base: str) -> None:
    """Builds `tag`, unless its label has the digest of the current files and base image."""
    content = hashlib.sha256((image_id(base) or "").encode())
    for name in [dockerfile, *files]:
        content.update((FOLDER / name).read_bytes())
    digest = content.hexdigest()
    labelled = run(
        ["docker", "image", "inspect", "--format", f'{{{{index .Config.Labels "{CONTENT}"}}}}', tag], check=False
    )
    if labelled.stdout.strip() == digest:
        return
    # The classic builder with host networking: the only combination that reaches a package archive during a build
    # on machines whose bridge has no route to the outside.
    argv = [
        "docker",
        "build",
        "-q",
        "--network",
        "host",
        "--label",
        f"{CONTENT}={digest}",
        "--build-arg",
        f"BASE_IMAGE={base}",
    ]
    argv += ["-t", tag, "-f", str(FOLDER / dockerfile), str(FOLDER)]
    run(["env", "DOCKER_BUILDKIT=0", *argv], timeout=600)


def purge(settings: Settings) -> None:
    """Removes the images and the cached tarball."""
    suites = {BASE_SUITE, NODE_SUITE}
    for tag in (NODE_IMAGE, TRAIN_IMAGE, *(f"debian:{suite}-slim" for suite in suites)):
        if image_id(tag):
            try:
                docker("image", "rm", "-f", tag)
            except CommandFailed as error:
                raise BedUnavailable(f"cannot remove {tag}, is another bed using it? {error}") from error
    for suite in suites:
        base_tarball(settings, suite).unlink(missing_ok=True)
