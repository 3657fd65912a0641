"""The torchvision that matches a torch version: every row of both tables, and versions not in the tables."""

import csv

import pytest

from launcher.image import versions
from launcher.image.names import asset
from launcher.image.versions import belong_together, numbers, published, release, torchvision_for, variant


def rows(name):
    return list(csv.DictReader(line for line in asset(name).splitlines() if not line.startswith("#")))


PATCHES = [(row["torch"], row["torchvision"]) for row in rows("torchvision.csv") if row["level"] == "patch"]
MINORS = [(row["torch"], row["torchvision"]) for row in rows("torchvision.csv") if row["level"] == "minor"]
NVIDIA = [row for row in rows("ngc.csv") if row["torch"]]


@pytest.mark.parametrize(("torch", "torchvision"), PATCHES)
def test_a_published_torch_gets_its_own_row(torch, torchvision):
    assert torchvision_for(torch.split()[0]) == torchvision


@pytest.mark.parametrize("local", ["+cpu", "+cu124", "+rocm6.2"])
def test_a_published_torch_is_known_with_its_variant(local):
    assert torchvision_for(f"2.9.1{local}") == "0.24.1"


@pytest.mark.parametrize(("torch", "torchvision"), MINORS)
def test_a_snapshot_is_looked_up_by_its_minor_version(torch, torchvision):
    if torch.startswith("<="):
        assert torchvision_for("1.0.0a0+abcdef0") == versions.PURE_PYTHON
        return
    newest = torchvision.split("/")[-1].strip()
    found = torchvision_for(f"{torch}.0a0+abcdef0.nv25.01")
    assert found is not None
    assert found.startswith(newest)
    assert len(found.split(".")) == 3


@pytest.mark.parametrize("row", NVIDIA, ids=lambda row: row["tag"])
def test_every_documented_nvidia_release_maps_to_its_official_pair(row):
    found = torchvision_for(row["torch"])
    pair = row["pair"].split("/")[-1].strip() or "0.15"  # 22.12's torch 1.14.0a0 became 2.0
    patch_rows_differ = {"1.2.0": "0.4.0"}  # the README says 0.4.1, pytorch.org's previous-versions page 0.4.0
    if row["torch"] in patch_rows_differ:
        assert found == patch_rows_differ[row["torch"]]
    else:
        assert numbers(found)[:2] == numbers(pair)[:2]


@pytest.mark.parametrize(
    ("torch", "torchvision"),
    [
        ("2.6.0a0+ecf3bae40a.nv25.01", "0.21.0"),
        ("2.14.0a0+b2c75dd062.nv26.9.68203377", "0.29.0"),
        ("2.14.1+cu130", "0.29.1"),
        ("2.15.0+cu132", "0.29.2"),
        ("2.14.7", "0.29.0"),  # a patch release newer than the table: its minor version's first
        ("1.14.0a0+410ce96", "0.15.0"),
        ("1.1.0commit 0885dd28", "0.3.0"),
        ("1.1.0 + commit 0885dd28 (2019-05-28)", "0.3.0"),
        ("2.31.0a0+123", "0.46.0"),  # beyond the table
        ("3.0.0", None),
        ("unknown", None),
        ("", None),
    ],
)
def test_special_versions(torch, torchvision):
    assert torchvision_for(torch) == torchvision


def test_what_counts_as_published():
    assert published("2.6.0")
    assert published("2.6.0+cu124")
    assert not published("2.6.0a0+ecf3bae40a.nv25.01")
    assert not published("1.1.0commit")
    assert (variant("2.6.0+cpu"), variant("2.6.0+cu118"), variant("2.6.0"), variant("2.6.0a0+x")) == (
        "cpu",
        "cu118",
        "",
        "",
    )


@pytest.mark.parametrize(
    ("tag", "differs"),
    [
        *[(tag, True) for tag in ("21.11-py3", "25.06", "26.02", "26.04-py3", "26.06-py3")],
        *[(tag, False) for tag in ("21.10", "25.08", "26.09", "19.06")],
    ],
)
def test_known_mismatches_of_nvidia_releases(tag, differs):
    assert bool(release(tag).mismatch) is differs


def test_releases_are_found_by_reference():
    assert release("nvcr.io/nvidia/pytorch:26.09-py3").cuda == "13.4"
    assert release("nvcr.io/nvidia/pytorch:26.09-py3@sha256:" + "0" * 64).tag == "26.09-py3"
    assert release("nvcr.io/nvidia/pytorch:99.01-py3") is None


def test_pairs():
    assert belong_together("2.14.1+cu130", "0.29.1+cu130") is True
    assert belong_together("2.8.0a0+5228986c39.nv25.06", "0.22.0a0+95f10a4e") is False
    assert belong_together("2.8.0", "") is None
