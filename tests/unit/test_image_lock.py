"""The lock file of a job."""

import json

import pytest

from launcher.errors import JobInvalid
from launcher.image import lock
from launcher.job.parts import Image

LOCK = lock.Lock(
    base="nvcr.io/nvidia/pytorch:26.09-py3",
    torchvision_asked="auto",
    packages=("six",),
    base_id="sha256:" + "a" * 64,
    base_digest="sha256:" + "b" * 64,
    user="",
    torch="2.14.0a0+b2c75dd062.nv26.09",
    torchvision="0.29.0a0",
    step="keep",
    why="torchvision works",
    image="launcher/x:1",
    image_id="sha256:" + "c" * 64,
)


def test_the_lock_file_is_next_to_the_job_and_round_trips(tmp_path):
    path = lock.lock_path(tmp_path / "vgg.yaml")
    assert path.name == "vgg.lock.json"
    assert lock.read(path) is None
    lock.write(path, LOCK)
    assert lock.read(path) == LOCK
    before = path.stat().st_mtime_ns
    lock.write(path, LOCK)
    assert path.stat().st_mtime_ns == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["vgg.lock.json"]


def test_the_lock_file_is_valid_until_the_image_section_changes():
    same = {"base": LOCK.base, "packages": ["six"]}
    assert LOCK.fits(Image.model_validate(same))
    for change in ({"packages": []}, {"torchvision": "0.29.1"}, {"base": "other:1"}):
        assert not LOCK.fits(Image.model_validate({**same, **change}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"base": 1}', "\x00"])
def test_a_broken_lock_file_is_reported_with_a_fix(tmp_path, text):
    path = tmp_path / "x.lock.json"
    path.write_text(text)
    with pytest.raises(JobInvalid, match=r"x\.lock\.json") as refusal:
        lock.read(path)
    assert "remove it" in refusal.value.next_step


def test_a_lock_file_of_another_format_is_refused(tmp_path):
    path = tmp_path / "x.lock.json"
    lock.write(path, LOCK)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(JobInvalid, match="format 99"):
        lock.read(path)
