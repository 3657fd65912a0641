"""GPUs of containers: the image's CUDA and the driver, the Container Toolkit's errors, GPUs that systemd takes away.

Texts were recorded by others, the source beside each; none was seen on hardware of ours.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launcher.errors import ImageUnfit, NodesFailed, NodeUnfit
from launcher.faults.lookup import cause_of_report
from launcher.faults.table import ENGINE
from launcher.image import cuda
from launcher.image.probe import MARK, full_report, image_facts
from launcher.model.container import ContainerSpec
from launcher.model.facts import EngineFacts, Gpu, ImageInfo, Launch, MigInstance, NodeFacts, NvidiaFacts
from launcher.planning import gpu_checks, gpus
from launcher.planning.checks import Level
from tests.gpu_rows import TOOLKIT, UNSATISFIED
from tests.unit.test_plan import job, node, planned

NGC = "nvcr.io/nvidia/pytorch"


def driven(driver: str, newest: str = "", name: str = "gpu-0") -> NodeFacts:
    return node(0, gpus=1, name=name, nvidia=NvidiaFacts(driver=driver, cuda=newest))


@pytest.mark.parametrize(
    ("driver", "image", "version", "needs", "other"),
    [
        ("470.82.01", f"{NGC}:24.03-py3", "12.4.0.041", "525.60.13", "22.12-py3"),
        ("525.60.11", "x:1", "12.0", "525.60.13", "22.12-py3"),
        ("450.36.06", "x:1", "11.0.194", "450.80.02", "20.03-py3"),
        ("535.104.05", f"{NGC}:26.09-py3", "13.4", "580.65.06", "25.06-py3"),
        ("580.65.05", "x:1", "13.0", "580.65.06", "25.06-py3"),
        ("580.65.05", "x:1", "14.1", "580.65.06", "25.06-py3"),
        ("418.40.04", "x:1", "10.2", "440.33", "19.10-py3"),
        ("300.1", "x:1", "10.2", "440.33", ""),
    ],
)
def test_a_driver_below_the_familys_least_is_refused(
    driver: str, image: str, version: str, needs: str, other: str
) -> None:
    with pytest.raises(NodesFailed) as refusal:
        cuda.check([driven(driver)], version, image)
    assert refusal.value.exit_code == 3
    told = str(refusal.value)
    assert f"node gpu-0: NVIDIA driver {driver} is too old for image {image} with CUDA {version}" in told
    assert f"needs {needs} or newer" in told
    assert "update the driver" in told
    assert (f"use {NGC}:{other}" in told) == bool(other)


@pytest.mark.parametrize(
    ("driver", "newest", "version"),
    [
        ("525.60.13", "12.0", "12.0.1"),
        ("550.54.14", "12.4", "12.4.0.041"),
        ("550.54.14", "12.4", "11.8"),
        ("580.65.06", "13.0", "12.9"),
        ("450.80.02", "", "11.8"),
        ("", "", "12.4"),
        ("470.82.01", "11.4", ""),
        ("a driver", "x", "y"),
    ],
)
def test_a_driver_that_is_new_enough_or_not_known_says_nothing(driver: str, newest: str, version: str) -> None:
    assert cuda.check([driven(driver, newest)], version, "x:1") == []


def test_inside_the_family_there_is_a_note_on_minor_version_compatibility() -> None:
    [note] = cuda.check([driven("535.104.05", "12.2"), driven("550.54.14", "12.4", "gpu-1")], "12.4.0.041", "x:1")
    assert note.startswith("gpu-0: NVIDIA driver 535.104.05 (CUDA 12.2) is older than the CUDA 12.4.0.041 of image x:1")
    assert "minor-version compatibility" in note


def test_a_branch_that_the_release_notes_list_runs_on_data_center_gpus() -> None:
    [note] = cuda.check([driven("440.33.01", "10.2")], "11.4.2", f"{NGC}:21.09-py3")
    assert "data center GPUs only" in note
    with pytest.raises(NodesFailed):
        cuda.check([driven("440.33.01", "10.2")], "11.4.2", "x:1")


def test_nvidias_images_are_known_by_their_tag_before_they_are_pulled() -> None:
    assert cuda.of_name(f"{NGC}:26.09-py3") == "13.4"
    assert cuda.of_name("other/pytorch:26.09-py3") == ""
    assert cuda.of_name(f"{NGC}:99.01-py3") == ""


class Engine:
    """That gives the facts of a node, as explaining_refused_cuda() asks for them."""

    def __init__(self, facts: NodeFacts) -> None:
        self.facts = lambda: facts


@pytest.mark.parametrize(
    ("facts", "needs", "other"),
    [
        (driven("470.82.01", "11.4"), "needs 525.60.13 or newer", "22.12-py3"),
        (driven("550.54.14", "12.4"), "needs a driver for CUDA 12.8", "24.05-py3"),  # within the family
    ],
)
def test_the_images_own_requirement_gets_the_same_message(facts: NodeFacts, needs: str, other: str) -> None:
    with pytest.raises(NodeUnfit) as told, cuda.explaining_refused_cuda(Engine(facts), "x:1"):  # type: ignore[arg-type]
        raise NodeUnfit("gpu-0", UNSATISFIED)
    assert f"NVIDIA driver {facts.nvidia.driver} (CUDA {facts.nvidia.cuda}) is too old for image x:1" in str(told.value)
    assert needs in str(told.value)
    assert other in str(told.value)
    with pytest.raises(NodeUnfit, match="its disk is full"), cuda.explaining_refused_cuda(Engine(facts), "x:1"):  # type: ignore[arg-type]
        raise NodeUnfit("gpu-0", "its disk is full")


def test_an_image_is_tried_on_an_idle_gpu_and_on_none_for_a_job_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that a colleague has, torchvision's operators fail: no memory, or exclusive mode."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    used = Gpu(0, "GPU-0", "Tesla T4", 15360, "535.54", 15000)
    facts = dataclasses.replace(node(0, engine=LEGACY), gpus=(used, Gpu(1, "GPU-1", "Tesla T4", 15360, "535.54")))
    tried: list[tuple[str, ...]] = []

    class Prober(Engine):
        host = "gpu-0"

        def run_probe(self, spec: ContainerSpec, timeout: float) -> tuple[int, bytes]:
            tried.append(spec.gpus)
            return 0, f'{MARK}{{"python": "python3"}}'.encode()

    image = ImageInfo("sha256:1", (), (), "amd64", (), {}, (), 1)
    for engine, gpus_ in ((Prober(facts), True), (Prober(facts), False)):
        full_report(engine, image, "x:1", gpus=gpus_)  # type: ignore[arg-type]
    full_report(Prober(dataclasses.replace(facts, gpus=(used,))), dataclasses.replace(image, id="2"), "x:2")  # type: ignore[arg-type]
    assert tried == [("GPU-1",), (), ()]


ENTRY = ("/usr/local/bin/_entrypoint.sh",)  # of micromamba: activates an environment


@pytest.mark.parametrize(
    ("bare", "activated", "entrypoint", "torch"),
    [
        ('{"python": ""}', '{"python": "python3", "torch_folder": "/opt/conda/torch", "run": true}', ENTRY, True),
        ('{"python": "python3", "torch_folder": "/usr/torch", "run": true}', "usage: serve [-h]", ENTRY, True),
        ('{"python": "python3"}', "usage: serve [-h]", ("serve",), False),  # a program of its own
        ('{"python": "python3"}', '{"python": "python3"}', ENTRY, False),
        ('{"python": ""}', '{"python": "python3", "torch_folder": "/opt/conda/torch", "run": true}', (), False),
    ],
)
def test_torch_is_found_in_the_environment_that_the_entrypoint_activates(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bare: str,
    activated: str,
    entrypoint: tuple[str, ...],
    *,
    torch: bool,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Prober(Engine):
        node = host = "gpu-0"

        def run_probe(self, spec: ContainerSpec, timeout: float) -> tuple[int, bytes]:
            started = spec.argv[: len(entrypoint)] == entrypoint and entrypoint != ()
            said = activated if started else bare
            return 0, f"{MARK if said[0] == '{' else ''}{said}".encode()

    engine = Prober(node(0, engine=LEGACY))
    image = ImageInfo("sha256:1", (), (), "amd64", entrypoint, {}, (), 1)
    found = image_facts(engine, "x:1", image, ContainerSpec("", "", ()))  # type: ignore[arg-type]
    assert (found.launch is Launch.RUN) == torch
    assert bool(full_report(engine, image, "x:1").torch_folder) == torch  # type: ignore[arg-type]


def test_an_image_for_another_architecture_is_told_from_one_without_sh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Prober(Engine):
        node = host = "gpu-0"

        def run_probe(self, spec: ContainerSpec, timeout: float) -> tuple[int, bytes]:
            return 255, b"exec /usr/bin/sh: exec format error\n"

    image = ImageInfo("sha256:1", (), (), "arm64", (), {}, (), 1)
    with pytest.raises(ImageUnfit, match="for another CPU architecture") as refused:
        image_facts(Prober(node(0, engine=LEGACY)), "x:1", image, ContainerSpec("", "", ()))  # type: ignore[arg-type]
    assert "--platform" in refused.value.next_step


@pytest.mark.parametrize(("source", "words", "what", "fix"), TOOLKIT, ids=[row[0] for row in TOOLKIT])
def test_each_error_of_the_toolkit_has_its_own_fix(source: str, words: str, what: str, fix: str) -> None:
    found = cause_of_report(ENGINE, words)
    assert found is not None, source
    assert what in found.what
    assert fix in found.fix


def test_other_errors_are_not_the_toolkits() -> None:
    assert cause_of_report(ENGINE, "write /x: no space left on device") is None
    assert cause_of_report(ENGINE, 'exec: "python": executable file not found in $PATH') is None


FILES = ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-modeset")
LEGACY = EngineFacts("e", "27.0", False, ("runc", "nvidia"), (), "/var/lib/docker", 1 << 40, cgroup="systemd")


def machine(engine: EngineFacts = LEGACY, **nvidia: object) -> NodeFacts:
    """Whose device files are numbered in another order than its GPUs."""
    cards = tuple(Gpu(i, f"GPU-{i}", "Tesla T4", 15360, "535.54", minor=2 - i) for i in range(3))
    theirs = NvidiaFacts(device_files=FILES, smi=True, smi_exit=0, **nvidia)  # type: ignore[arg-type]
    return dataclasses.replace(node(0, engine=engine), gpus=cards, nvidia=theirs)


def test_the_device_files_of_the_chosen_gpus_are_passed_beside_the_request() -> None:
    container = planned(job(1, gpus=[0]), [machine()]).master.container
    assert container.gpu_driver == "nvidia"
    assert container.docker["devices"] == ("/dev/nvidia2", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-modeset")
    assert planned(job(1, gpus="none"), [machine()]).master.container.docker["devices"] == ()
    own = job(1, gpus=[0], docker={"devices": ["/dev/nvidiactl:/dev/nvidiactl:rw"]})
    assert [d.partition(":")[0] for d in planned(own, [machine()]).master.container.docker["devices"]].count(
        "/dev/nvidiactl"
    ) == 1


def test_cdi_is_preferred_where_the_engine_names_the_gpus_by_uuid() -> None:
    named = dataclasses.replace(LEGACY, cdi_devices=tuple(f"nvidia.com/gpu=GPU-{i}" for i in range(2)))
    container = planned(job(1, gpus=[0, 1]), [machine(named)]).master.container
    assert (container.gpu_driver, container.docker["devices"]) == ("cdi", ())
    assert planned(job(1, gpus=[2]), [machine(named)]).master.container.gpu_driver == "nvidia"
    by_index = dataclasses.replace(LEGACY, runtimes=("runc",), cdi_devices=("nvidia.com/gpu=0", "nvidia.com/gpu=all"))
    with pytest.raises(NodeUnfit, match="--device-name-strategy=uuid"):
        planned(job(1, gpus=[0]), [machine(by_index)])


def test_the_device_file_of_an_instances_gpu_is_passed() -> None:
    whole = machine()
    divided = dataclasses.replace(whole.gpus[1], mig=True, instances=(MigInstance("MIG-1", "1g.10gb"),))
    facts = dataclasses.replace(whole, gpus=(whole.gpus[0], divided))
    assert gpus.device_files(facts, ["MIG-1"])[0] == "/dev/nvidia1"


def test_the_capability_files_of_a_gpu_are_passed_with_all_of_its_instances() -> None:
    """Of a part of them they are not: CUDA takes the first instance that it may open."""
    whole, files = machine(), tuple(f"/dev/nvidia-caps/nvidia-cap{number}" for number in (12, 13, 21, 22))
    instances = (MigInstance("MIG-1", "1g.10gb"), MigInstance("MIG-2", "1g.10gb"))
    divided = dataclasses.replace(whole.gpus[1], mig=True, instances=instances, instance_files=files)
    seen = dataclasses.replace(whole.nvidia, device_files=(*FILES, *files[:3]))  # one has not been made yet
    facts = dataclasses.replace(whole, gpus=(divided,), nvidia=seen)
    assert gpus.device_files(facts, ["MIG-1", "MIG-2"])[-3:] == files[:3]
    assert set(gpus.device_files(facts, ["MIG-2"])) & set(files) == set()


@pytest.mark.parametrize(
    ("toolkit", "mode", "cgroup", "warns"),
    [
        ("1.17.8", "auto", "systemd", True),
        ("1.9.0", "", "systemd", True),
        ("1.18.0", "auto", "systemd", False),
        ("2.0", "auto", "systemd", False),
        ("1.17.8", "cdi", "systemd", False),
        ("1.17.8", "auto", "cgroupfs", False),
        ("", "auto", "systemd", False),
    ],
)
def test_doctor_warns_of_a_toolkit_that_loses_gpus(toolkit: str, mode: str, cgroup: str, warns: bool) -> None:
    facts = machine(dataclasses.replace(LEGACY, cgroup=cgroup), toolkit=toolkit, toolkit_mode=mode)
    told = [check.what for check in gpu_checks.of_node(facts, "all", isolated=True) if check.level is Level.WARN]
    assert [f"with NVIDIA Container Toolkit {toolkit}, containers lose" in what for what in told] == [True] * warns


@pytest.mark.parametrize(
    ("kind", "version", "toolkit", "told"),
    [
        ("podman", "4.9.3", "1.19.1", "5.1"),  # nvidia-container-toolkit issue 1860
        ("podman", "4.9.3", "1.18.2", ""),
        ("podman", "5.7.0", "1.19.1", ""),  # the same issue 1940
        ("Docker", "26.1.4", "1.20.0", "27.0"),
        ("Docker", "27.0.3", "1.20.0", ""),
        ("Docker", "24.0.7", "1.20.0", ""),  # it has no CDI, and uses the NVIDIA runtime
        ("Docker", "", "1.20.0", ""),
        ("Docker", "26.1.4", "", ""),
    ],
)
def test_a_specification_that_an_old_engine_cannot_read_is_named(
    kind: str, version: str, toolkit: str, told: str
) -> None:
    engine = EngineFacts("e", version, False, ("runc", "nvidia"), (), "/var/lib/docker", kind=kind)
    nvidia = NvidiaFacts(driver="580.65.06", toolkit=toolkit, cdi_specs=("/etc/cdi/nvidia.yaml",))
    facts = node(0, gpus=1, nvidia=nvidia, engine=engine)
    found = [check for check in gpu_checks.of_node(facts, "all", isolated=True) if check.name == "cdi"]
    assert [(check.level, told in check.fix) for check in found] == [(Level.WARN, True)] * bool(told)
    assert all(f"{kind} {version} may not read the CDI 0.7.0" in check.what for check in found)
    none = dataclasses.replace(facts, engine=dataclasses.replace(engine, runtimes=("runc",)))
    if told and kind == "Docker":  # no other way to pass GPUs: the run is refused with this reason
        with pytest.raises(NodeUnfit, match="may not read the CDI"):
            gpus.driver(none, gpus.select(none, "all"))
