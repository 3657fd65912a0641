"""The key `data` of a job file, and the mounts that the plan makes of it."""

from __future__ import annotations

import pytest

from launcher.errors import JobInvalid
from launcher.job.dump import dump_job
from launcher.job.loader import parse_job
from launcher.model.container import DataSet
from launcher.planning.offline import offline

JOB = "name: x\nimage: {ref: y}\nnodes: [a, b]\nrun: {module: train}\n"


@pytest.mark.parametrize(
    ("data", "line", "text"),
    [
        ("data: ./pets", 5, "expected a mapping"),
        ("data:\n  pets: ./pets", 6, "expected {from: SOURCE, at: /path}"),
        ("data:\n  pets: {from: ./pets, to: /pets}", 6, "expected {from: SOURCE, at: /path}"),
        ("data:\n  pets: {from: 'a:b', at: /pets}", 6, "absolute path after the host"),
        ("data:\n  pets: {from: 'https://me:key@host/pets', at: /pets}", 6, "a URL with credentials"),
        ("data:\n  pets: {from: ./pets, at: pets}", 6, "pets"),
        (
            "runtime: process\ndata:\n  pets: {from: 'https://h/x', at: /d}",
            7,
            "get no copies of a URL: download it first",
        ),
        ("data:\n  ../x: {from: ./pets, at: /pets}", 6, "short name"),
        ("data:\n  pets: {from: ./pets, at: /output}", 6, "is the run's output folder"),
        ("data:\n  pets: {from: ./pets, at: /d}\n  cats: {from: ./cats, at: /d}", 7, "is the target of pets"),
        ("mounts: {/x: /d}\ndata:\n  pets: {from: ./pets, at: /d}", 7, "is the target of /x"),
        ("data:\n  pets: {from: ./pets, at: /workspace}", 6, "would hide the code"),
    ],
)
def test_a_wrong_data_key_is_refused_with_its_line(data: str, line: int, text: str) -> None:
    with pytest.raises(JobInvalid) as refused:
        parse_job(JOB + data + "\n", "job.yaml")
    assert f"job.yaml:{line}" in str(refused.value)
    assert text in str(refused.value)


def test_data_is_written_as_it_is_read_and_mounted_read_only() -> None:
    job = parse_job(JOB + "data: {pets: {from: 'gpu-a:/pets', at: /data/pets}}\n", "job.yaml")
    assert job.data == (DataSet("pets", "gpu-a:/pets", "/data/pets"),)
    assert parse_job(dump_job(job), "again.yaml").data == job.data
    mount = offline(job, "code").nodes[1].container.mounts[-1]
    assert (mount.target, mount.read_only) == ("/data/pets", True)
