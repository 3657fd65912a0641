"""sbatch scripts, compared with golden files, and the jobs that they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import JobInvalid
from launcher.features.slurm import script as slurm
from launcher.features.slurm.targets import SLURM
from launcher.job.dump import dump_job
from launcher.job.loader import parse_job
from launcher.job.settings import Cluster
from launcher.planning.cluster import build
from tests.bed.fixtures import unavailable
from tests.bed.settings import BedUnavailable
from tests.exported import CPU, DIGEST, GPU, job
from tests.slurm.bed import install
from tests.unit.test_coming_from import job_of

GOLDEN = Path(__file__).parent / "golden"
HPC = Cluster(
    kind="slurm",
    login="hpc",
    workdir="/shared/ada",
    partition="gpu",
    account="lab",
    qos="normal",
    time="2d",
    container="pyxis",
    options=("--constraint=h100", "--gres-flags enforce-binding"),
)
APPTAINER = HPC.model_copy(update={"container": "apptainer", "options": ()})
OCI = HPC.model_copy(update={"container": "oci", "options": ()})


def sbatch(data: dict[str, Any], cluster: Cluster = slurm.ANY) -> str:
    loaded = job(data)
    slurm.check(loaded, cluster.container)
    return slurm.render(build(loaded, cluster.python, cluster.gpus), cluster)


def need_program(name: str) -> None:
    """Skip the test if the program of Debian's package of that name cannot be installed."""
    try:
        install((name,), (name,), allowed=bool(os.environ.get("LAUNCHER_BED_REQUIRED")))
    except BedUnavailable as error:
        unavailable(str(error))


TEXTS = {
    "digits.sbatch": lambda: sbatch(CPU),
    "imagenet.pyxis.sbatch": lambda: sbatch(GPU, HPC),
    "imagenet.apptainer.sbatch": lambda: sbatch(GPU, APPTAINER),
    "imagenet.oci.sbatch": lambda: sbatch(GPU, OCI),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_export_equals_the_golden_file(name: str) -> None:
    text, golden = TEXTS[name](), GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", TEXTS)
def test_a_script_is_valid_bash(name: str) -> None:
    subprocess.run(["bash", "-n"], input=TEXTS[name](), text=True, check=True)


@pytest.fixture(scope="module")
def shellcheck() -> None:
    need_program("shellcheck")


@pytest.mark.parametrize("name", TEXTS)
def test_shellcheck_has_no_warnings(name: str, shellcheck: None, tmp_path: Path) -> None:
    (tmp_path / name).write_text(TEXTS[name]())
    done = subprocess.run(
        ["shellcheck", "--severity=warning", str(tmp_path / name)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_an_image_is_unpacked_by_umoci(tmp_path: Path) -> None:
    """As root and as a user who is not."""
    need_program("umoci")
    for argv in (["init", "--layout", "image.part.oci"], ["new", "--image", "image.part.oci:it"]):
        subprocess.run(["umoci", *argv], cwd=tmp_path, check=True)
    (command,) = [line.strip(" &") for line in sbatch(GPU, OCI).splitlines() if "umoci unpack" in line]
    assert command.endswith('"$image.part"')
    (tmp_path / "id").write_text("#!/bin/sh\necho ${MY_UID-0}\n")
    (tmp_path / "id").chmod(0o755)
    for uid, mapped in (("0", False), ("1000", True)):
        if os.geteuid() and uid == "0":
            continue
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "MY_UID": uid, "image": f"{tmp_path}/image"}
        subprocess.run(["bash", "-euc", f"rm -rf $image.part; {command}"], env=env, check=True)
        made = json.loads((tmp_path / "image.part" / "config.json").read_text())
        assert ("uidMappings" in made["linux"]) == mapped


def refused(data: dict[str, Any], cluster: Cluster, **keys: Any) -> str:
    with pytest.raises(JobInvalid) as caught:
        sbatch({**data, **keys}, cluster)
    return str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "data", "keys", "expected"),
    [
        (slurm.ANY, CPU, {"gpus": "all"}, "gpus: the number of GPUs of a node is unknown"),
        (slurm.ANY, GPU, {}, "image: the cluster has no container tool"),
        (HPC, GPU, {"gpus": [0, 1]}, "gpus: a cluster allocates GPUs by number"),
        (HPC, GPU, {"nodes": [{"host": "a", "address": "10.0.0.1"}]}, "nodes.0.address: a cluster chooses"),
        (HPC, GPU, {"nodes": [{"host": "a", "gpus": 1}]}, "nodes.0.gpus: a cluster chooses"),
        (HPC, GPU, {"nodes": [{"host": "a", "env": {"A": "1"}}]}, "nodes.0.env: a cluster chooses"),
        (HPC, GPU, {"image": {"ref": "a:1"}}, "image.ref: is imported only once, and a tag may move"),
        (HPC, GPU, {"image": {"ref": "a:1"}}, "skopeo inspect --format '{{.Name}}@{{.Digest}}' docker://a:1"),
        (
            HPC,
            GPU,
            {"image": {"base": f"a@{DIGEST}", "packages": ["timm"]}},
            "image.packages: images are not built",
        ),
        (HPC, GPU, {"image": {"base": f"a@{DIGEST}"}}, "image.torchvision: images are not built"),
        (HPC, GPU, {"docker": {"devices": ["/dev/fuse"]}}, "docker.devices.0: additional devices are not"),
        (HPC, GPU, {"docker": {"ipc": "private"}}, "docker.ipc: containers on Slurm share"),
        (HPC, GPU, {"docker": {"cap_add": ["SYS_PTRACE"]}}, "docker.cap_add: containers on Slurm"),
        (HPC, GPU, {"docker": {"extra_hosts": {"a": "::1"}}}, "docker.extra_hosts: containers on Slurm"),
        (HPC, GPU, {"resources": {"cpus": 1.5}}, "resources.cpus: Slurm allocates only whole CPUs"),
        (HPC, GPU, {"run": {"script": "../x.py"}}, "run.script: is outside the code folder"),
        (
            HPC,
            GPU,
            {"sweep": [{"a": 1}]},
            "sweep: a script or manifest is a single run: to export a variant, use --set s",
        ),
        (
            HPC,
            GPU,
            {"sweep": [{"a": 1}], "nodes": {"pool": [*"abcd"], "each": 2}},
            "a variant, use --set nodes=2 --set sweep=null --set run.args.KEY",
        ),
        (HPC, GPU, {"sweep": {"code": ["a", "b"]}}, "to export a variant, check out its code, then use --set sweep=n"),
    ],
)
def test_unsupported_keys_are_refused_with_their_line(
    cluster: Cluster, data: dict[str, Any], keys: dict[str, Any], expected: str
) -> None:
    message = refused(data, cluster, **keys)
    assert message.startswith("job.yaml:"), message
    assert int(message.split(":")[1]) > 0
    assert expected in message


def test_ten_thousand_nodes_take_at_most_a_second_and_200_mb() -> None:
    code = """
import time
from pathlib import Path
from launcher.features.slurm import script as slurm
from launcher.job.models import Job
from launcher.planning.cluster import build
hosts = [f"gpu-{i}" for i in range(10_000)]
job = Job.model_validate({"name": "big", "runtime": "docker", "image": {"ref": "a"}, "nodes": hosts, "gpus": 8,
    "run": {"module": "train"}})
before = time.process_time()
text = slurm.render(build(job, "python3"), slurm.ANY.model_copy(update={"container": "pyxis"}))
seconds = time.process_time() - before
(peak,) = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
print(seconds, peak, "--nodes=10000" in text)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, kilobytes, right = done.stdout.split()
    assert float(seconds) < 5  # 0.3 on an idle machine
    assert float(kilobytes) < 200_000
    assert right == "True"


# --- known pitfalls of other launchers


def test_pitfall_1_pyxis_is_not_assumed() -> None:
    assert "container" not in sbatch({**CPU, "restarts": 1})
    assert "pyxis, apptainer or oci" in refused(GPU, slurm.ANY)


def test_pitfall_2_the_sites_default_of_mpi_is_overridden() -> None:
    for text in (sbatch(CPU), sbatch(GPU, HPC), sbatch(GPU, APPTAINER)):
        assert "srun --mpi=none " in text


def test_a_node_that_succeeds_does_not_end_the_others() -> None:
    """They may still write a checkpoint. srun's --wait would end them some seconds after the first one."""
    for text in (sbatch(CPU), sbatch(GPU, HPC), sbatch(GPU, APPTAINER), sbatch(GPU, OCI)):
        assert "--kill-on-bad-exit=1 --wait=0 " in text


def test_pitfall_3_the_image_is_an_option_of_srun_not_of_sbatch() -> None:
    directives = [line for line in sbatch(GPU, HPC).splitlines() if line.startswith("#SBATCH")]
    assert not [line for line in directives if "container" in line]
    assert '--container-image="$image"' in sbatch(GPU, HPC)


def import_step(text: str) -> str:
    """Return the part of a script that imports the image."""
    return text[text.index("# --- the image") : text.index("# --- run all nodes")]


@pytest.mark.parametrize(("tool", "cluster"), [("enroot", HPC), ("apptainer", APPTAINER)])
def test_pitfalls_4_and_5_an_image_is_imported_once_by_its_digest(tool: str, cluster: Cluster, tmp_path: Path) -> None:
    """Two jobs at the same time, and a third one later."""
    here = cluster.model_copy(update={"workdir": str(tmp_path)})
    fake = tmp_path / tool
    fake.write_text(
        f'#!/bin/sh\n[ "$1" != version ] || {{ echo 4.0.1; exit; }}\n'
        f'echo "$@" >>{tmp_path}/calls\nsleep 0.3\nfor i; do case $i in *.part) : >"$i";; esac; done\n'
    )
    fake.chmod(0o755)
    step, env = import_step(sbatch(GPU, here)), {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    both = [subprocess.Popen(["bash", "-c", step], env=env) for _ in range(2)]
    assert [one.wait(20) for one in both] == [0, 0]
    subprocess.run(["bash", "-c", step], env=env, check=True)
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert call.endswith(f"pytorch@{DIGEST}")
    suffix = {"enroot": "sqsh", "apptainer": "sif"}[tool]
    assert (tmp_path / ".launcher" / "images" / f"{DIGEST.replace(':', '-')}.{suffix}").exists()


def test_pitfall_8_no_variable_of_torchruns_own_options_is_set() -> None:
    assert "PET_" not in sbatch(CPU)


def test_a_number_of_nodes_suffices_only_for_a_cluster() -> None:
    assert "#SBATCH --nodes=4" in sbatch({**CPU, "nodes": 4})
    loaded = job({**CPU, "nodes": 2})
    assert parse_job(dump_job(loaded)) == loaded
    with pytest.raises(JobInvalid, match=r"job\.yaml:\d+: nodes: .*--on CLUSTER"):
        loaded.hosts()
    with pytest.raises(JobInvalid, match=r"job\.yaml:\d+.*nodes: expected a number of nodes from 1"):
        job({**CPU, "nodes": 0})


def test_a_jobs_bundle_has_the_images_folders_read_only_and_the_jobs_folders(tmp_path: Path) -> None:
    """Run the script that an `oci` export contains, on an unpacked image."""
    image, bundle, data = tmp_path / "image", tmp_path / "bundle", tmp_path / "data"
    for folder in (image / "rootfs" / "usr", image / "rootfs" / "dev", data):
        folder.mkdir(parents=True)
    (image / "rootfs" / "bin").symlink_to("usr/bin")
    namespaces = [{"type": "mount"}, {"type": "network"}, {"type": "ipc"}]
    process = {"env": ["A=it's"], "cwd": "/"}
    before = {"process": process, "linux": {"namespaces": namespaces}, "mounts": [{"destination": "/dev/shm"}]}
    (image / "config.json").write_text(json.dumps(before))
    script = (Path(slurm.__file__).parent / "oci_bundle.py").read_text()
    assert script in sbatch(GPU, OCI)
    argv = [sys.executable, "-", str(image), str(bundle), "/work", f"{data}:/data:ro"]
    subprocess.run(argv, input=script, text=True, check=True)
    made = json.loads((bundle / "config.json").read_text())
    assert (made["process"]["cwd"], made["linux"]["namespaces"]) == ("/work", [{"type": "mount"}])
    *own, last = [(m["source"], m["destination"], m["options"]) for m in made["mounts"]]
    assert sorted(own) == [(f"{image}/rootfs/{name}", f"/{name}", ["rbind", "ro"]) for name in ("data", "usr")]
    assert last == (str(data), "/data", ["rbind", "ro"])  # over the image's own folder
    assert (bundle / "rootfs" / "bin").is_symlink()
    assert subprocess.check_output(["sh", "-c", f'. {bundle}/env; printf %s "$A"'], text=True) == "it's"


def test_the_job_of_the_page_for_those_who_come_from_sbatch_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    text = SLURM.text(parse_job(job_of("sbatch and srun")), None, None)
    lines = text.splitlines()
    assert {"#SBATCH --partition=gpu", "#SBATCH --account=lab", "#SBATCH --constraint=h100"} <= {*lines}, text
