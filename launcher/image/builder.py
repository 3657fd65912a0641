"""Build a repaired image with `docker buildx` on this machine, or with an engine's classic builder.

For Kubernetes, the code is added as one more layer.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from launcher.errors import ImageBuildFailed
from launcher.image import names
from launcher.image.faults import KEEP
from launcher.image.image_locations import image_store
from launcher.image.lock import Lock
from launcher.image.names import OURS, asset
from launcher.model.container import CODE
from launcher.model.facts import ImageInfo
from launcher.model.progress import Log, StatusLine
from launcher.node.engine import Engine

Members = Iterable[tuple[tarfile.TarInfo, bytes | None]]
IN_CONTEXT = "code"  # folder of the build context that is copied to CODE
CONTEXT = ("Dockerfile", "install.sh")  # files of images/; a Repair adds more
DECODER = ("decoder.Dockerfile", "decoder.sh")  # more of them, for the trainer's jobs
COPIED = "COPY --from=decoder /opt/launcher/decoder /opt/launcher/decoder\n"
NETWORK = "LAUNCHER_BUILD_NETWORK"  # host (default, because pip may need this machine's network) | default
PIP_INDEX_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST")
DOCKER_CLI_TIMEOUT = 30.0
LAST_LINES = 30
_BUILDKIT_PREFIX = re.compile(r"#\d+ (?:\d+\.\d+ )?")  # `--progress plain`: step number and seconds
_BUILD_STEP = re.compile(r"Step \d+/\d+ : |\[[^]]*\d+/\d+\] ")  # classic builder | BuildKit
# Errors of engines that do not allow the host network in builds
NO_HOST_NETWORK = ("network.host is not allowed", "user namespaces", "host network namespace")


@dataclass(frozen=True)
class Repair:
    """An image to build and its builder. If `changes_nothing`, the base is used unchanged."""

    builder: Engine
    info: ImageInfo  # the base on the builder
    lock: Lock  # base and decision, for the lock file; torch is "" if the base was not probed
    roi: str = ""  # the source of the trainer's decoder, used if lock.decoder is set

    @property
    def changes_nothing(self) -> bool:
        return self.lock.step == KEEP and not self.lock.packages and not self.lock.decoder

    @property
    def digest(self) -> str:
        """Return a hash (24 hex digits) of all inputs of the build, including the files of images/."""
        parts = [self.info.id, self.lock.step, self.lock.packages, self.info.user]
        files = [asset(name) for name in CONTEXT]
        if self.lock.decoder:
            files += [*(asset(name) for name in DECODER), self.roi]
        return hashlib.sha256(json.dumps([parts, files]).encode()).hexdigest()[:24]

    def tag(self, job: str) -> str:
        """Return `launcher/<job>:<digest>`."""
        return f"{OURS}{job}:{self.digest}"

    def labels(self, job: str) -> dict[str, str]:
        """Return the labels of the built image: its origin and the reason for the repair."""
        found = {
            names.RECIPE: self.digest,
            names.JOB: job,
            names.TORCH: self.lock.torch,
            names.TORCHVISION: self.lock.torchvision,
            names.STEP: self.lock.step,
            names.WHY: self.lock.why,
            names.BASE_ID: self.info.id,
            names.OCI_BASE_NAME: self.lock.base,
            names.OCI_BASE_DIGEST: self.lock.base_digest,
            names.OCI_TITLE: f"launcher image of job {job}",
        }
        return {key: value for key, value in found.items() if value}

    def files(self) -> Mapping[str, str]:
        """Return the build context by file name. Raises ImageBuildFailed."""
        context = {name: asset(name) for name in CONTEXT}
        context["requirements.txt"] = "".join(f"{line}\n" for line in self.lock.packages)
        if self.lock.decoder:
            first, script = (asset(name) for name in DECODER)
            context |= {"Dockerfile": first + context["Dockerfile"] + COPIED, "decoder.sh": script, "roi.c": self.roi}
        if authority := pip_authority():
            context["ca.crt"] = authority
        return context

    def arguments(self, base: str) -> dict[str, str]:
        """Return the build arguments. base: name of the base in the builder's store. Raises ImageBuildFailed."""
        user = self.info.user or "root"
        return {"BASE_IMAGE": base, "TORCHVISION": self.lock.step, "RUN_USER": user, **dict(pip_index())}


def pip_index(environment: Mapping[str, str] = os.environ) -> tuple[tuple[str, str], ...]:
    """Return the caller's pip index settings, so that the build uses the same index.

    Raises ImageBuildFailed if a URL contains a password, which would remain readable in the image history.
    """
    settings = [(name, environment.get(name, "").strip()) for name in PIP_INDEX_VARIABLES]
    for name, value in settings:
        if any(urlsplit(address).password for address in value.split()):
            raise ImageBuildFailed(
                f"environment variable {name}",
                "contains a password, which would be readable in the image history",
                "use an index without a password, or build the image elsewhere and set image.ref",
            )
    return tuple((name, value) for name, value in settings if value)


def pip_authority(environment: Mapping[str, str] = os.environ) -> str:
    """Return the CA certificates that the caller's pip trusts (PIP_CERT), "" if it is not set."""
    path = environment.get("PIP_CERT", "").strip()
    if not path:
        return ""
    try:
        return Path(path).read_text(encoding="ascii", errors="ignore")
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        raise ImageBuildFailed("environment variable PIP_CERT", what, "correct or unset it") from error


def build(repair: Repair, tag: str, job: str, *, local: bool, log: Log) -> ImageInfo:
    """Build the image on the builder as `tag` and return it. local: the builder is this machine's engine.

    Raises ImageBuildFailed with the last lines of the builder's output.
    """
    build_by = _run_buildx if local and has_buildx() else image_store(repair.builder).build
    context, labels = context_archive(repair.files()), repair.labels(job)
    say = BuildSteps(repair.builder.node, log)

    def run(name: str, network: str) -> None:
        try:
            build_by(context, tag=tag, arguments=repair.arguments(name), labels=labels, network=network, say=say)
        except ImageBuildFailed as error:
            if not network or not any(text in str(error) for text in NO_HOST_NETWORK):
                raise
            log("the engine does not allow the host network in builds; building with its default network")
            run(name, "")

    network = "" if os.environ.get(NETWORK, "host") == "default" else "host"
    return _build_on(repair.info, repair.builder, tag, partial(run, network=network))


def add_code(
    engine: Engine, base: ImageInfo, job: str, digest: str, members: Members, log: Log
) -> tuple[str, ImageInfo]:
    """Build an image from `base` with the code in CODE; return its tag and info. members: files under IN_CONTEXT."""
    tag = f"{OURS}{job}-code:{hashlib.sha256(f'{base.id} {digest}'.encode()).hexdigest()[:24]}"

    def run(name: str) -> None:
        steps = {"Dockerfile": f"FROM {name}\nCOPY {IN_CONTEXT} {CODE}\nWORKDIR {CODE}\n"}
        context, say = context_archive(steps, members), BuildSteps(engine.node, log)
        image_store(engine).build(context, tag=tag, arguments={}, labels={names.JOB: job}, network="", say=say)

    return tag, _build_on(base, engine, tag, run)


class BuildSteps:
    """Logs a builder's output as StatusLines: the build step and the last line of its output."""

    def __init__(self, node: str, log: Log) -> None:
        self._node, self._log, self._step = node, log, ""

    def __call__(self, line: str) -> None:
        text = _BUILDKIT_PREFIX.sub("", line)
        if _BUILD_STEP.match(text):
            self._step = text
        last = "" if text == self._step else f" | {text}"
        self._log(StatusLine(self._node, f"building: {self._step}{last}"))


def _build_on(base: ImageInfo, engine: Engine, tag: str, run: Callable[[str], None]) -> ImageInfo:
    """Build `tag` with `run(base)` and return the image. The base gets a tag: builders look up IDs in a registry."""
    store, name = image_store(engine), f"{OURS}base:{base.id.partition(':')[2][:24]}"
    store.tag(base.id, name)
    try:
        run(name)
    finally:
        if base.tags or base.repo_digests:  # otherwise this tag is the only reference to the base
            store.remove(name)
    built = store.inspect(tag)
    if built is None:
        raise ImageBuildFailed(engine.node, f"the build succeeded but {tag} is missing", "check the engine's log")
    return built


def has_buildx() -> bool:
    """Whether this machine's Docker CLI can build with BuildKit."""
    return _docker_cli("buildx", "version") is not None


def _docker_cli(*arguments: str) -> str | None:
    """Return its output, or None if it fails."""
    argv = ["docker", *arguments]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=DOCKER_CLI_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def buildx_argv(
    tag: str, arguments: Mapping[str, str], labels: Mapping[str, str], network: str, builder: str
) -> list[str]:
    """Return the command line of a build with the engine's own BuildKit; it reads the context from stdin."""
    argv = ["docker", "buildx", "build", "--builder", builder, "--load", "--progress", "plain", "--tag", tag]
    if network:
        argv += ["--network", network]
    for key, value in arguments.items():
        argv += ["--build-arg", f"{key}={value}"]
    for key, value in labels.items():
        argv += ["--label", f"{key}={value}"]
    return [*argv, "-"]


def context_archive(files: Mapping[str, str], members: Members = ()) -> bytes:
    """Return a reproducible tar archive of files and of members of another archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in sorted(files.items()):
            data = text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for member, content in members:
            archive.addfile(member, io.BytesIO(content) if content is not None else None)
    return buffer.getvalue()


def _run_buildx(
    context: bytes, *, tag: str, arguments: Mapping[str, str], labels: Mapping[str, str], network: str, say: Log
) -> None:
    # The engine's own builder is named like the CLI's context; other builders cannot see the engine's images
    argv = buildx_argv(tag, arguments, labels, network, _docker_cli("context", "show") or "default")
    last = deque[str](maxlen=LAST_LINES)
    with tempfile.TemporaryFile() as stdin:
        stdin.write(context)
        stdin.seek(0)
        process = subprocess.Popen(argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if text := line.decode(errors="replace").rstrip():
                    last.append(text)
                    say(text)
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        raise ImageBuildFailed(
            "image build",
            f"docker buildx exited with code {process.returncode}; last lines of its output:\n    "
            + "\n    ".join(last),
            "see the first error in these lines",
        )
