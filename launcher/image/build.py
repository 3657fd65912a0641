"""One image from one recipe: by `docker buildx` on this machine, by the engine's classic builder anywhere."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from launcher.errors import ImageBuildFailed
from launcher.image.recipe import Recipe
from launcher.image.reference import OURS
from launcher.image.stores import store
from launcher.node.engine import Engine, ImageInfo

Say = Callable[[str], None]
NETWORK = "LAUNCHER_BUILD_NETWORK"  # host (the default: pip needs whatever way out this machine has) | default
BUILDX_PROBE_TIMEOUT = 30.0
LAST_LINES = 30
# An engine's words when it does not grant the host's network to builds
NO_HOST_NETWORK = ("network.host is not allowed", "user namespaces", "host network namespace")


def build(
    recipe: Recipe,
    tag: str,
    labels: Mapping[str, str],
    engine: Engine,
    base: ImageInfo,
    *,
    on_this_machine: bool,
    say: Say,
) -> ImageInfo:
    """Build on `engine`, whose store has `base`; the image, named `tag` there.

    Raises ImageBuildFailed with the last lines of the builder's output.
    """
    images = store(engine)
    name = (
        f"{OURS}base:{base.id.partition(':')[2][:24]}"  # builders want a name; an id or a digest they look up elsewhere
    )
    images.tag(base.id, name)
    try:
        network = "" if os.environ.get(NETWORK, "host") == "default" else "host"
        try:
            _build(recipe, tag, labels, engine, name, network, on_this_machine, say)
        except ImageBuildFailed as error:
            if not network or not any(words in str(error) for words in NO_HOST_NETWORK):
                raise
            say("the engine does not grant its host's network to builds: building with its own network")
            _build(recipe, tag, labels, engine, name, "", on_this_machine, say)
    finally:
        if base.tags or base.repo_digests:  # else that name is all that keeps the base
            images.remove(name)
    built = images.inspect(tag)
    if built is None:
        raise ImageBuildFailed(engine.node, f"the build ended well but {tag} is not there", "look at the engine's log")
    return built


def has_buildx() -> bool:
    """Whether this machine's Docker CLI can build with BuildKit."""
    try:
        done = subprocess.run(
            ["docker", "buildx", "version"], capture_output=True, timeout=BUILDX_PROBE_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def buildx_argv(
    folder: str, tag: str, arguments: Mapping[str, str], labels: Mapping[str, str], network: str, builder: str
) -> list[str]:
    """The command line of a build with the engine's own BuildKit, which sees the engine's images."""
    argv = ["docker", "buildx", "build", "--builder", builder, "--load", "--progress", "plain", "--tag", tag]
    if network:
        argv += ["--network", network]
    for key, value in arguments.items():
        argv += ["--build-arg", f"{key}={value}"]
    for key, value in labels.items():
        argv += ["--label", f"{key}={value}"]
    return [*argv, folder]


def context_archive(files: Mapping[str, str]) -> bytes:
    """The build context as a tar archive, the same bytes for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in sorted(files.items()):
            data = text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _build(
    recipe: Recipe, tag: str, labels: Mapping[str, str], engine: Engine, base: str, network: str, here: bool, say: Say
) -> None:
    arguments = recipe.arguments(base)

    def hear(line: str) -> None:
        if line.strip():
            say(line)

    if not here or not has_buildx():
        context = context_archive(recipe.files())
        store(engine).build(context, tag=tag, arguments=arguments, labels=labels, network=network, say=hear)
        return
    with tempfile.TemporaryDirectory(prefix="launcher-build-") as folder:
        for name, text in recipe.files().items():
            path = Path(folder) / name
            path.write_text(text, encoding="utf-8")
            os.utime(path, (0, 0))
        _stream(buildx_argv(folder, tag, arguments, labels, network, _own_builder()), hear)


def _own_builder() -> str:
    """The builder that is the engine itself: named like the CLI's context. Others do not see the engine's images."""
    done = subprocess.run(
        ["docker", "context", "show"], capture_output=True, text=True, timeout=BUILDX_PROBE_TIMEOUT, check=False
    )
    return done.stdout.strip() or "default"


def _stream(argv: list[str], say: Say) -> None:
    """Run a builder, every line of its output to `say`."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last.append(line.rstrip())
                say(line.rstrip())
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        raise ImageBuildFailed(
            "image build",
            f"docker buildx ended with exit code {process.returncode}; its last lines:\n    " + "\n    ".join(last),
            "the first error among these lines is the cause",
        )
