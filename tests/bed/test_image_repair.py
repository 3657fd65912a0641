"""Broken images are repaired, or refused with the name of the fault: on real engines, with real torch."""

import base64
import dataclasses
import os
import re
import shutil

import pytest
import yaml

from launcher.errors import ImageBuildFailed, ImageUnfit
from launcher.image import names
from launcher.image.builder import has_buildx
from launcher.image.ensure import ensure
from launcher.image.faults import Report
from launcher.image.image_locations import ImageLocations
from launcher.image.probe import full_report
from launcher.image.repair import ImageVerdict, plan_repair
from launcher.job.parts import Image
from launcher.node.connect import caller_engine, connect
from tests.bed import standins
from tests.bed.host import docker
from tests.bed.shell import run
from tests.e2e.cli import ROOT, Cli

pytestmark = pytest.mark.bed
JOB = "bed-test"  # in the name of every image that is built here
FORWARD = """
import sys
import torch, torchvision
model = torchvision.models.vgg16(num_classes=10)
print("logits", tuple(model(torch.zeros(2, 3, 32, 32)).shape), "torchvision", torchvision.__version__)
"""


@pytest.fixture
def local(bed):
    with caller_engine() as engine:
        assert engine is not None
        yield engine
        for made in engine.images.list({names.JOB: JOB}):
            docker("image", "rm", "-f", made.id)


@pytest.fixture(scope="module")
def faulty(bed):
    return standins.faulty()


class Log(list):
    def __call__(self, line):
        self.append(line)


def image(**keys):
    return Image.model_validate(keys)


def test_a_base_without_torch_is_refused(local):
    with pytest.raises(ImageUnfit, match="launcher-bed-train: the image has no torch") as refusal:
        plan_repair(image(base="launcher-bed-train"), ImageLocations([local], local, Log()))
    assert refusal.value.exit_code == 4
    assert "keep" in refusal.value.next_step


def test_a_base_that_does_not_exist_is_refused(local):
    with pytest.raises(ImageUnfit, match="nonexistent") as refusal:
        plan_repair(image(base="registry.invalid/nonexistent:1"), ImageLocations([local], local, Log()))
    assert refusal.value.next_step


def test_packages_on_a_kept_base_are_built_once_and_give_the_same_name(local):
    requested = image(base="launcher-bed-train", torchvision="keep", packages=["six"])
    log = Log()
    first = ensure(requested, ImageLocations([local], local, log), job=JOB)
    again = ensure(requested, ImageLocations([local], local, Log()), job=JOB)
    assert first.built
    assert not again.built
    assert again.id == first.id
    assert any("install.sh packages" in line for line in log)  # the builder's output
    docker("image", "rm", first.reference)
    again = ensure(requested, ImageLocations([local], local, Log()), job=JOB)
    assert again.id == first.id  # by the builder's cache
    info = local.images.inspect(first.reference)
    assert info.labels[names.OCI_BASE_NAME] == "launcher-bed-train"
    assert info.labels[names.WHY] == "image.torchvision is keep: nothing was checked"


# Writes a wheel that installs, and whose import fails as that of one that was compiled for another torch.
BROKEN = r"""
import zipfile
info = "broken-1.0.dist-info"
with zipfile.ZipFile("/broken-1.0-py3-none-any.whl", "w") as wheel:
    wheel.writestr("broken/__init__.py", "raise ImportError('broken_C.so: undefined symbol: _ZN3c10')")
    wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*wheel.namelist(), f"{info}/RECORD"]))
"""


def test_a_package_that_cannot_be_imported_is_refused_and_not_used_by_the_next_run(local):
    program = base64.b64encode(BROKEN.encode()).decode()
    base = standins.on_top("launcher-bed-train", "launcher-bed-broken", f"RUN echo {program} | base64 -d | python3 -")
    requested = image(base=base, torchvision="keep", packages=["six", "broken @ file:///broken-1.0-py3-none-any.whl"])
    for _ in range(2):
        log = Log()
        with pytest.raises(
            ImageUnfit, match="package broken cannot be imported: import broken: ImportError"
        ) as refusal:
            ensure(requested, ImageLocations([local], local, log), job=JOB)
        assert refusal.value.exit_code == 4
        assert "import broken: ImportError: broken_C.so: undefined symbol: _ZN3c10" in str(refusal.value)
        assert "image.packages" in refusal.value.next_step
        assert any("importing six, broken" in str(line) for line in log)
    assert local.images.list({names.JOB: JOB}) == []
    docker("image", "rm", "-f", base)


def test_a_node_builds_with_the_classic_builder_if_the_caller_has_no_docker(clean_bed):
    hosts = [(node.alias, node.alias) for node in clean_bed.nodes[:2]]
    requested = image(base="launcher-bed-train", torchvision="keep", packages=["six"])
    with connect(hosts, ssh_config=clean_bed.ssh_config) as fleet:
        done = ensure(requested, ImageLocations(fleet.engines, None, Log()), job=JOB)
        assert done.built
        assert list(done.shipped) == ["node2"]
        for engine in fleet.engines:
            assert engine.images.inspect(done.reference).id == done.id
            engine.images.remove(done.reference)


def test_a_failed_build_shows_the_builders_output(local):
    requested = image(base="launcher-bed-train", torchvision="keep", packages=["surely-no-such-package-0"])
    with pytest.raises(
        ImageBuildFailed, match="No matching distribution found for surely-no-such-package-0"
    ) as failure:
        ensure(requested, ImageLocations([local], local, Log()), job=JOB)
    assert failure.value.exit_code == 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_vgg_without_adaptive_pool_is_named_and_repaired_without_replacing_torch(local, faulty):
    requested = image(base=faulty)
    repair = plan_repair(requested, ImageLocations([local], local, Log()))
    assert repair.lock.step == "wheel 0.29.1 cu130"
    assert "VGG without adaptive pool: torchvision 0.2.1 < 0.2.2" in repair.lock.why
    done = ensure(requested, ImageLocations([local], local, Log()), job=JOB)
    info = local.images.inspect(done.reference)
    after, before = (full_report(local, each, done.reference) for each in (info, repair.info))
    verdict = ImageVerdict(done.reference, after, before)
    rows = {what: (before, after) for what, before, after in verdict.rows()}
    assert re.search("mat1 and mat2 shapes cannot be multiplied", rows["VGG16 on 32x32"][0])
    assert rows["VGG16 on 32x32"][1] == "ok"
    assert rows["torchvision"] == ("0.2.1", "0.29.1+cu130")
    assert rows["torch"][0] == rows["torch"][1] == "2.14.1+cu130"
    assert info.labels[names.TORCHVISION] == "0.29.1"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("requested", "there"), [("auto", "0.29.1+cu130"), ("0.29.0", "0.29.0+cu130")])
def test_a_missing_torchvision_is_installed(local, faulty, requested, there):
    base = standins.on_top(faulty, "launcher-bed-faulty:none", "RUN pip uninstall -y torchvision")
    done = ensure(image(base=base, torchvision=requested), ImageLocations([local], local, Log()), job=JOB)
    info = local.images.inspect(done.reference)
    assert full_report(local, info, done.reference).torchvision == there


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_image_without_pip_is_refused_with_the_reason(local, faulty):
    base = standins.on_top(faulty, "launcher-bed-faulty:no-pip", "RUN rm -rf /usr/lib/python3/dist-packages/pip*")
    with pytest.raises(ImageUnfit, match="has no pip to install torchvision"):
        plan_repair(image(base=base), ImageLocations([local], local, Log()))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_cpu_torch_with_a_cuda_wheel_is_reported(local, bed, tmp_path):
    wheel = standins.download("torch==2.13.0", tmp_path)
    if "+cpu" not in wheel.name:
        pytest.skip(f"the package index of this machine has no CPU build of torch, but {wheel.name}")
    base = standins.faulty(
        "launcher-bed-faulty:cpu",
        wheel,
        TORCH="torch==2.13.0+cpu",
        TORCHVISION="torchvision==0.28.0",
        OTHERS="pillow",
    )
    repair = plan_repair(image(base=base), ImageLocations([local], local, Log()))
    assert "operator torchvision::nms does not exist" in repair.lock.why
    assert "built for CPU, torchvision 0.28.0" in repair.lock.why
    assert repair.lock.step == "wheel 0.28.0 cpu"
    try:
        done = ensure(image(base=base), ImageLocations([local], local, Log()), job=JOB)
    except ImageBuildFailed as refusal:  # without access to the PyTorch index, the only one with that wheel
        assert "No matching distribution found for torchvision==0.28.0+cpu" in str(refusal)  # noqa: PT017
        assert refusal.exit_code == 4  # noqa: PT017
    else:
        report = full_report(local, local.images.inspect(done.reference), done.reference)
        assert not ImageVerdict(done.reference, report).faults()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_torchvision_newer_than_torch_is_named_and_repaired(local, bed):
    base = standins.faulty(
        "launcher-bed-faulty:newer", TORCH="torch==2.10.0", TORCHVISION="torchvision==0.29.1", OTHERS="pillow"
    )
    repair = plan_repair(image(base=base), ImageLocations([local], local, Log()))
    assert "torchvision 0.29.1+cu130 was built for another CUDA" in repair.lock.why
    assert "torch 2.10.0 needs torchvision 0.25.0" in repair.lock.why
    done = ensure(image(base=base), ImageLocations([local], local, Log()), job=JOB)
    report = full_report(local, local.images.inspect(done.reference), done.reference)
    assert report.torchvision.startswith("0.25.0")
    assert report.torch == full_report(local, repair.info, base).torch


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_working_oddity_is_reported_each_time_and_nothing_is_built(local, faulty, tmp_path):
    line = "RUN if [ -f /build/ca.crt ]; then export PIP_CERT=/build/ca.crt; fi \\\n"
    line += " && python3 -m pip install --no-deps torchvision==0.2.2.post3"
    base = standins.on_top(faulty, "launcher-bed-faulty:unusual", line)
    for _ in range(2):  # probed, then read from the lock file
        log = Log()
        locations, file = ImageLocations([local], local, log), tmp_path / "x.lock.json"
        done = ensure(image(base=base), locations, job=JOB, lock_file=file)
        assert done.reference == base
        assert any("note: torchvision 0.2.2 is not the official pair" in text for text in log)
        assert any("note: torchvision 0.2.2 has no operators" in text for text in log)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_from_the_original_error_to_a_trained_vgg(clean_bed, local, tmp_path, faulty):
    """The unrepaired image fails with the original error; `up` of the bed's job repairs it, copies it and trains."""
    cli = Cli(tmp_path, {"LAUNCHER_SSH_CONFIG": str(clean_bed.ssh_config)})
    (tmp_path / "forward.py").write_text(FORWARD)
    as_it_is = {
        "name": "vgg-as-it-is", "image": {"ref": faulty}, "nodes": ["node1", "node2"], "gpus": "none",
        "run": {"script": "forward.py"}, "timeout": "5m",
    }  # fmt: skip
    (tmp_path / "first.yaml").write_text(yaml.safe_dump(as_it_is))
    failed = cli("up", "first.yaml", code=1, timeout=300)
    assert "mat1 and mat2 shapes cannot be multiplied (2x512 and 25088x4096)" in failed.stdout + failed.stderr
    cli("down", "vgg-as-it-is")

    (tmp_path / "jobs" / "data").mkdir(parents=True)
    for name in ("bed_vgg16.yaml", "data/digits.tar"):
        (tmp_path / "jobs" / name).write_bytes((ROOT / "jobs" / name).read_bytes())
    shutil.copytree(ROOT / "train", tmp_path / "train", ignore=shutil.ignore_patterns("__pycache__"))
    remove(clean_bed, "launcher/bed-vgg16")  # left by an earlier test run
    for made in local.images.list({names.JOB: "bed-vgg16"}):
        docker("image", "rm", "-f", made.id)
    done = cli("up", "jobs/bed_vgg16.yaml", timeout=1500)
    assert "building on node1 from launcher-bed-faulty: VGG without adaptive pool" in done.stderr
    assert "torchvision: 0.2.1 -> 0.29.1" in done.stderr
    assert "VGG16 on 32x32: RuntimeError: mat1 and mat2" in done.stderr
    assert re.search(r"val Acc@1 \d+", done.stdout)
    cli("down", "bed-vgg16")

    again = cli(
        "up", "jobs/bed_vgg16.yaml", "-d", timeout=300
    )  # nothing is built or sent, but the reason is still reported
    assert "as locked, built from launcher-bed-faulty: VGG without adaptive pool" in again.stderr
    assert "building" not in again.stderr
    assert "from this machine to" not in again.stderr
    cli("down", "bed-vgg16")
    remove(clean_bed, "launcher/bed-vgg16", faulty)  # the second is the base of the first


def remove(bed, *images):
    for node in bed.nodes[:2]:
        for name in images:
            bed.sh(node, f"docker images -q {name} | sort -u | xargs -r docker image rm -f")


def test_a_replaced_torch_is_detected_by_its_build_string(local):
    """torch is compared by its whole build string, not just by its version number."""
    before = Report(python="python3", torch="2.6.0a0+ecf3bae40a.nv25.01")
    after = dataclasses.replace(before, torch="2.6.0")
    assert (
        "torch was replaced: 2.6.0a0+ecf3bae40a.nv25.01 before, 2.6.0 now" in ImageVerdict("x", after, before).faults()
    )


@pytest.mark.parametrize("buildkit", ["0", "1"])
def test_the_dockerfile_builds_with_both_builders(bed, tmp_path, buildkit):
    """As docker-compose.yml uses it: only the folder, everything else as build arguments."""
    for name in ("Dockerfile", "install.sh", "requirements.txt"):
        shutil.copy(ROOT / "images" / name, tmp_path)
    if authority := os.environ.get("PIP_CERT"):  # pip in the build trusts the same authority as pip here
        shutil.copy(authority, tmp_path / "ca.crt")
    if buildkit == "1" and not has_buildx():
        pytest.skip("no buildx on this machine")
    tag = f"launcher-test-dockerfile:{buildkit}"
    argv = ["docker", "build", "--network", "host", "-t", tag, "--build-arg", "BASE_IMAGE=launcher-bed-train"]
    argv += ["--build-arg", "PACKAGES=six", str(tmp_path)]
    try:
        run(["env", f"DOCKER_BUILDKIT={buildkit}", *argv], timeout=240)
        assert docker("run", "--rm", tag, "python3", "-c", "import six; print(six.__name__)") == "six"
    finally:
        run(["docker", "image", "rm", "-f", tag], check=False)
