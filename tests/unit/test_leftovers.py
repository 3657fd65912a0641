"""Which images `clean` removes: those that runs recorded in this folder have used, unless it is asked for all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import launcher
from launcher.cli.clean import _explain, _fetched, _of_this_folder
from launcher.image.names import PARTIAL, RECIPE
from launcher.model import caches, labels
from launcher.model.container import ContainerState, Phase
from launcher.model.facts import ImageInfo
from launcher.node import output_folder
from launcher.node.process.engine import ProcessEngine
from launcher.records.store import Record, records
from launcher.run.end.leftovers import Leftovers, find_leftovers, remove_leftovers, unused_images

HERE, REBUILT = "job-20260101-000000-aaaa", "job-20260101-000000-bbbb"


def image(name: str, *tags: str, label: str = RECIPE, value: str = "x") -> ImageInfo:
    return ImageInfo(f"sha256:{name}", tags, (), "amd64", (), {label: value}, (), 1)


IMAGES = [
    image("by-id"),
    image("by-name", "launcher/mine:1"),
    image("on-the-second-node"),
    image("a-part", label=PARTIAL, value="sha256:by-id"),
    image("theirs", "launcher/theirs:1"),
    image("rebuilt"),
    image("part-of-theirs", label=PARTIAL, value="sha256:theirs"),
]


class Engine(ProcessEngine):
    """Plain processes, with images."""

    @property
    def images(self):  # type: ignore[no-untyped-def,override]
        def listed(wanted: Mapping[str, str | None]) -> Sequence[ImageInfo]:
            return [each for each in IMAGES if wanted.keys() <= each.labels.keys()]

        return SimpleNamespace(list=listed)

    def list(self, labels: Mapping[str, str | None]) -> Sequence[ContainerState]:
        return []


def record(run: str, *, rebuilt: bool, image: str, image_id: str, ids: Sequence[str]) -> None:
    def node(rank: int) -> dict[str, object]:
        container = {"name": f"launcher-{run}-{rank}", "output_dir": f"/h/.launcher/{run}", "image": ids[rank]}
        return {"node": f"n{rank}", "host": f"n{rank}", "rank": rank, "first_rank": rank, "processes": 1} | {
            "container": container
        }

    plan = {"run": run, "job": "job", "image": image, "image_id": image_id, "nodes": [node(0), node(1)]}
    folder = Path("runs", run)
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan | ({} if rebuilt else {"rendezvous": {}})))


def test_only_images_that_a_run_of_this_folder_has_used_are_its_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    ids = ["sha256:by-id", "sha256:on-the-second-node"]
    record(HERE, rebuilt=False, image="launcher/mine:1", image_id=ids[0], ids=ids)
    record(REBUILT, rebuilt=True, image="", image_id="sha256:rebuilt", ids=ids)
    assert all(isinstance(each, Record) for each in records())
    (found,) = find_leftovers([Engine("local")], records())
    assert isinstance(found, Leftovers)
    assert len(found.images) == len(IMAGES)
    assert [each.id for each in _of_this_folder(found).images] == [each.id for each in IMAGES[:4]]
    assert {name.partition(":")[2] for name in found.recorded} == {"by-id", "by-name", "on-the-second-node", "a-part"}


def test_containers_of_runs_that_ended_are_left_over_and_what_is_just_starting_is_not(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    record(HERE, rebuilt=False, image="", image_id="", ids=["", ""])
    Path("runs", HERE, "events.jsonl").write_text('{"time": 1.0, "event": "down", "failed": []}\n')

    def state(name: str, run: str, purpose: str, phase: Phase) -> ContainerState:
        known = {labels.RUN: run, labels.PURPOSE: purpose, labels.UID: str(os.getuid())}
        return ContainerState(name, name, "", known, phase, 0 if phase.ended else None)

    states = [
        state("taken-down", HERE, "run", Phase.EXITED),
        state("never-started", HERE, "run", Phase.CREATED),
        state("running-again", HERE, "run", Phase.RUNNING),
        state("bench-starts", REBUILT, "bench", Phase.CREATED),
    ]

    class Listed(ProcessEngine):
        def list(self, wanted: Mapping[str, str | None]) -> Sequence[ContainerState]:
            return [each for each in states if wanted.keys() <= each.labels.keys()]

    (found,) = find_leftovers([Listed("local")], records())
    assert isinstance(found, Leftovers)
    assert [each.state.name for each in found.containers] == ["taken-down", "never-started"]


@pytest.mark.parametrize("phase", [Phase.CREATED, Phase.RUNNING, Phase.EXITED, None])
def test_the_folder_of_a_killed_doctor_is_left_over_once_its_containers_have_ended(
    phase: Phase | None, tmp_path: Path, monkeypatch
) -> None:
    """None: they are removed already. It is no run's folder, and nothing in it has to be fetched."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    bench, theirs = (tmp_path / ".launcher" / run for run in (HERE, REBUILT))
    for folder, purpose in ((bench, "bench"), (theirs, "run")):
        output_folder.make(Engine("local").files, str(folder), folder.name, f"{folder}/workdir/a", purpose)
        (folder / "workdir" / "a" / "code.py").write_text("1")
    known = {labels.RUN: HERE, labels.PURPOSE: "bench", labels.UID: str(os.getuid())}
    states = [ContainerState("b", "b", "", known, phase, 0 if phase.ended else None)] if phase else []
    states += [ContainerState("c", "c", "", {**known, labels.PURPOSE: "claim"}, Phase.CREATED, None)]

    class Listed(ProcessEngine):
        def list(self, wanted: Mapping[str, str | None]) -> Sequence[ContainerState]:
            return [each for each in states if wanted.keys() <= each.labels.keys()]

        def remove(self, container: str) -> None:
            states[:] = [each for each in states if each.id != container]

    engine = Listed("local")
    assert output_folder.runs(engine.files) == {theirs.name}
    (found,) = find_leftovers([engine], [])
    assert isinstance(found, Leftovers)
    over = phase is None or phase.ended
    remove_leftovers(_fetched(_of_this_folder(found)))
    assert (bench.exists(), theirs.exists()) == (not over, True)
    assert [each.name for each in states] == (["c"] if phase is None else [] if over else ["b", "c"])


def test_what_a_shell_left_is_copied_by_hand_as_no_folder_started_a_run(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / ".launcher" / HERE
    output_folder.make(Engine("local").files, str(folder), HERE, f"{folder}/workdir/a", "shell")
    (folder / "notes").write_text("1")
    (found,) = find_leftovers([Engine("local")], [])
    assert isinstance(found, Leftovers)
    shown = _of_this_folder(found)
    assert [each.path for each in shown.outputs] == [str(folder)]
    assert not _fetched(shown).outputs
    _explain([found], [shown], kept=True)
    said = capsys.readouterr().err
    assert f"to download them: cp -r {folder} .; to remove them: --unfetched" in " ".join(said.split())
    assert "output folder " not in said.partition("; ")[2]


def test_an_empty_cache_of_an_image_that_is_gone_is_left_over_and_its_folder_goes_with_it(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    engine, folder = Engine("local"), tmp_path / ".launcher" / "cache"
    gone, there = (folder / caches.name(f"sha256:{name}", engine.facts().machine) for name in ("gone", "byid"))
    (gone / "torchinductor").mkdir(parents=True)
    there.mkdir()
    monkeypatch.setattr(f"{__name__}.IMAGES", [image("byid")])
    (found,) = find_leftovers([engine], [])
    assert isinstance(found, Leftovers)
    assert [cache.path for cache in found.caches] == [str(gone)]
    remove_leftovers(replace(found, images=()))
    assert [*folder.iterdir()] == [there]
    monkeypatch.setattr(f"{__name__}.IMAGES", [])
    (left,) = find_leftovers([engine], [])
    assert isinstance(left, Leftovers)
    remove_leftovers(left)
    assert [*folder.parent.iterdir()] == []


def test_an_image_that_was_pulled_by_its_digest_is_not_a_copy_that_a_killed_launcher_left() -> None:
    source = replace(image("here", "mine:1"), labels={}, content="same")
    copy = replace(image("copy"), labels={}, content="same")
    pulled = replace(image("pulled"), labels={}, content="same", repo_digests=("mine@sha256:1",))

    class There(Engine):
        @property
        def images(self):  # type: ignore[no-untyped-def,override]
            return SimpleNamespace(list=lambda wanted: [] if wanted else [source, copy, pulled])

    assert [each.id for each in unused_images(There("local"), [source])] == [copy.id]


def test_what_clean_removes_of_a_stopped_run_has_its_output_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was away when `down` ended the run (history 137-24)."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    run = {"command": ["sh", "-c", "echo printed; exec sleep 600"]}
    started = launcher.up({"name": "away", "runtime": "process", "nodes": ["local"], "run": run}, log=lambda _: None)
    engine, (record,) = ProcessEngine("local"), records()
    (state,) = engine.list({labels.RUN: started.id, labels.PURPOSE: "run"})
    log = next((tmp_path / ".launcher").glob("away-*")) / "logs" / "local.log"
    while not (log.exists() and log.read_text()):
        time.sleep(0.01)
    engine.stop(state.id, grace=0)
    record.event("down", removed=[], failed=["local does not answer"], kept=[])
    (found,) = find_leftovers([engine], [record])
    assert isinstance(found, Leftovers)
    remove_leftovers(found, [record])
    assert engine.list({labels.RUN: started.id, labels.PURPOSE: "run"}) == []
    assert Path("runs", started.id, "logs", "local.log").read_text() == "printed\n"
