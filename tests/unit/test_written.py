"""What a program wrote to its output folder: told from the launcher's own files, fetched in whole, and protected."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.node.files import FileEntry, Files
from launcher.node.machine import LocalMachine
from launcher.records.collect import Collected, OutputFolder, collect
from launcher.records.store import FETCHED, NodeOfRun, Record
from launcher.records.wanted import Want, is_ours, is_programs, want
from launcher.records.written import Written, summary, unfetched

RUN = "job-20260101-000000-aaaa"
PROGRAMS = [
    *("checkpoints/last.pt", "checkpoint-500/model.safetensors", "results.csv", "result.json", "job.yaml", "plan.json"),
    *("lightning_logs/version_0/checkpoints/e.ckpt", "lightning_logs/version_0/metrics.csv", "wandb/run", "output/x"),
    *("logs/train.csv", "logs/version_0/last.ckpt", "state/optimizer.pt", "errors/0001.png", "state/x/y.attempts"),
    *("tensorboard/version_0/checkpoints/e.ckpt", "tensorboard/last.pt", "generations/0001-0/best.pt", ".hidden"),
    *("flight_recorder.csv", "metrics.jsonl.old", "workdir/data/x", "workdir/x", "my.tfevents.csv/x", "a\nb", "a\\b"),
]
OURS = [
    *(".launcher-run", ".flight_recorder.tar", ".node/a/kit/home/x", "logs/gpu-a.log", "logs/gpu-a.clock"),
    *("logs/rank-3.log", "logs/gpu-a.nccl.17", "logs/slurm.log", "state/gpu-a.attempts", "state/gpu-a.groups"),
    *(
        "state/gpu-a.began",
        "state/gpu-a.master",
        "state/slurm.end",
        "state/node.sh",
        "state/bundle/config.json",
        "errors/gpu-a.json",
    ),
    *("flight_recorder/gpu-a/nccl_3", "generations/0001-0/rank-3.log"),
]
AT_THEIR_PLACE = [
    *("metrics.jsonl", "tensorboard/events.out.tfevents.1", "tensorboard/plugins/profile/x.pb"),
    *("generations/0001-0/metrics.jsonl", "generations/0001-0/tensorboard/events.out.tfevents.1"),
]


def test_each_file_of_an_output_folder_is_the_programs_or_the_launchers() -> None:
    assert [path for path in PROGRAMS if is_ours(path) or not is_programs(path)] == []
    assert [path for path in OURS if not is_ours(path) or is_programs(path)] == []
    assert [path for path in AT_THEIR_PLACE if is_ours(path) or is_programs(path)] == []


def test_all_that_is_the_programs_comes_on_request_and_the_rest_always() -> None:
    nameless = ["a\nb", "a\\b"]
    assert [path for path in PROGRAMS if want(path) is not None] == []
    assert [path for path in PROGRAMS if want(path, checkpoints=True) is None] == nameless
    assert [path for path in AT_THEIR_PLACE if want(path) is None] == []


class Nodes:
    """A run on nodes a, b, c that are folders of this machine, and its record."""

    def __init__(self, folder: Path, min_nodes: int = 0) -> None:
        self.folder = folder
        self.names = ["a", "b", "c"]
        nodes = [NodeOfRun(n, n, i, f"launcher-{RUN}-{i}", self.output(n), range(1)) for i, n in enumerate(self.names)]
        self.record = Record.rebuild(RUN, "docker", nodes, folder / "runs", min_nodes)
        for name in self.names:
            Path(self.output(name)).mkdir(parents=True)

    def output(self, name: str) -> str:
        return f"{self.folder}/{name}/.launcher/{RUN}"

    def write(self, name: str, path: str, text: str, time: float = 1e9) -> None:
        file = Path(self.output(name), path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        os.utime(file, (time, time))

    def fetch(self, *names: str, to: Path | None = None) -> list[str]:
        """Return the problems."""
        files = Files(LocalMachine("here", "me"))
        inherits = self.record.inherits
        folders = [OutputFolder(files, self.output(name), (name,), inherits) for name in names or self.names]
        replicas = self.record.min_nodes > 0
        found = collect(folders, to or self.here, checkpoints=True, nodes=self.names, replicas=replicas)
        return [str(problem) for one in found if isinstance(one, Collected) for problem in one.problems]

    @property
    def here(self) -> Path:
        return self.record.paths.root

    def left(self, name: str) -> list[str]:
        files = Files(LocalMachine("here", "me")).scan(self.output(name))
        return [file.path for file in unfetched(files, self.record)]

    def text(self, path: str) -> str:
        return (self.here / path).read_text()


def test_files_of_one_name_on_several_nodes_are_all_fetched(tmp_path: Path) -> None:
    """Of the same size and, nearly, of one time, as shards are."""
    nodes = Nodes(tmp_path)
    for index, name in enumerate(nodes.names):
        nodes.write(name, "ckpt/shard.pt", name, 1e9 + (index + 1) / 50)
        nodes.write(name, f"ckpt/rank-{name}.pt", name)
    nodes.write("c", "ckpt/rank-a.pt", "a")  # a copy, as a run has that was resumed
    assert sorted(nodes.left("b")) == ["ckpt/rank-b.pt", "ckpt/shard.pt"]
    assert nodes.fetch() == []
    assert [nodes.text(f"ckpt/rank-{name}.pt") for name in nodes.names] == nodes.names
    assert nodes.text("ckpt/shard.pt") == "a"
    assert [nodes.text(f"output/{name}/ckpt/shard.pt") for name in ("b", "c")] == ["b", "c"]
    assert sorted(path.name for path in (nodes.here / "output/c/ckpt").iterdir()) == ["shard.pt"]
    assert [nodes.left(name) for name in nodes.names] == [[], [], []]
    nodes.write("b", "ckpt/shard.pt", "B", 2e9)
    assert nodes.left("b") == ["ckpt/shard.pt"]
    nodes.fetch()
    assert (nodes.text("ckpt/shard.pt"), nodes.text("output/b/ckpt/shard.pt")) == ("a", "B")


def test_a_node_that_is_away_does_not_lose_the_copy_of_its_file(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.write("a", "last.pt", "a")
    nodes.write("b", "last.pt", "b", 1.1e9)
    nodes.fetch("a")
    nodes.fetch("b")
    assert (nodes.text("last.pt"), nodes.text("output/b/last.pt")) == ("a", "b")
    nodes.write("a", "last.pt", "newer", 2e9)
    nodes.fetch("a")  # of the others, none comes before it
    assert nodes.text("last.pt") == "newer"


def resumed(tmp_path: Path, *written: tuple[str, str]) -> Nodes:
    """A run that began at 1.5e9, all of whose nodes had inherited both files. written: since, by which node."""
    nodes = Nodes(tmp_path)
    nodes.record.event("resumes", earlier=RUN)
    for name in nodes.names:
        nodes.write(name, ".launcher-run", RUN, 1.5e9)
        nodes.write(name, "last.pt", "30")
        nodes.write(name, "rank-1.pt", "30")
    for name, path in written:
        nodes.write(name, path, "200", 1.6e9)
    return nodes


def test_what_a_node_has_only_inherited_gives_way_to_what_another_one_wrote(tmp_path: Path) -> None:
    nodes = resumed(tmp_path, ("a", "last.pt"), ("b", "rank-1.pt"))
    nodes.fetch()
    assert (nodes.text("last.pt"), nodes.text("rank-1.pt")) == ("200", "200")
    assert not (nodes.here / "output").exists()
    assert [nodes.left(name) for name in nodes.names] == [[], [], []]
    nodes.fetch("a")
    assert nodes.text("rank-1.pt") == "200", "not while its node is away either"


def test_what_a_run_has_only_inherited_is_fetched_once_and_protected_until_then(tmp_path: Path) -> None:
    nodes = resumed(tmp_path, ("b", "rank-1.pt"))
    assert sorted(nodes.left("a")) == ["last.pt", "rank-1.pt"]
    nodes.fetch("a")
    assert (nodes.text("last.pt"), nodes.text("rank-1.pt")) == ("30", "30")
    assert (nodes.left("a"), nodes.left("b")) == ([], ["rank-1.pt"])
    nodes.fetch()
    assert (nodes.text("last.pt"), nodes.text("rank-1.pt")) == ("30", "200")
    assert not (nodes.here / "output").exists()


def test_old_files_of_a_run_that_has_inherited_nothing_are_its_programs(tmp_path: Path) -> None:
    """It has unpacked them, with their times."""
    nodes = Nodes(tmp_path)
    for name in nodes.names:
        nodes.write(name, ".launcher-run", RUN, 1.5e9)
        nodes.write(name, "data", name, 1.6e9 if name == "b" else 1e9)
    nodes.fetch()
    assert (nodes.text("data"), nodes.text("output/b/data")) == ("a", "b")


def test_a_file_that_cannot_have_its_path_here_is_put_aside(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    plan, names = nodes.text("plan.json"), ["plan.json", "result.json", "output/a/x", "logs"]
    for path in names:
        nodes.write("b", path, "mine")
    nodes.write("a", "runs", "a file")
    nodes.write("b", "runs/last.pt", "below a folder")
    nodes.fetch()
    assert nodes.text("plan.json") == plan
    assert [nodes.text(f"output/b/{path}") for path in names] == ["mine"] * 4
    assert (nodes.text("runs"), nodes.text("output/b/runs/last.pt")) == ("a file", "below a folder")
    assert nodes.left("b") == []


def test_metrics_that_a_program_began_anew_are_fetched(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.write("a", "metrics.jsonl", "{}\n{}\n")
    nodes.fetch()
    nodes.write("a", "metrics.jsonl", "[]\n")
    assert nodes.left("a") == ["metrics.jsonl"]
    nodes.fetch()
    assert (nodes.text("metrics.jsonl"), nodes.text("output/a/metrics.jsonl")) == ("{}\n{}\n", "[]\n")
    assert nodes.left("a") == []


def test_with_min_nodes_one_copy_of_a_checkpoint_stands_for_all(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, min_nodes=2)
    for index, name in enumerate(nodes.names):
        nodes.write(name, "checkpoints/last.pt", name, 1e9 - index)
        nodes.write(name, "results.csv", name, 1e9 - index)
    nodes.fetch()
    assert sorted(str(path.relative_to(nodes.here)) for path in nodes.here.rglob("last.pt")) == ["checkpoints/last.pt"]
    assert [nodes.left(name) for name in nodes.names] == [[], [], []]
    nodes.fetch("c")
    assert nodes.text("checkpoints/last.pt") == "a"


def test_a_name_that_cannot_be_used_here_is_said_and_stays_protected(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.write("a", "a\\b.pt", "x")
    assert [problem for problem in nodes.fetch() if "has a name that cannot be used here" in problem]
    assert nodes.left("a") == ["a\\b.pt"]


def test_what_was_fetched_to_another_folder_is_fetched(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.write("b", "last.pt", "b")
    nodes.record.event(FETCHED, folder=str(tmp_path / "there"))
    assert nodes.left("b") == ["last.pt"]
    (tmp_path / "there").mkdir()
    nodes.fetch(to=tmp_path / "there")
    assert nodes.left("b") == []
    (tmp_path / "there" / "last.pt").write_text("longer")
    assert nodes.left("b") == ["last.pt"]


def test_the_code_of_a_run_that_another_folder_has_started_is_known_by_its_time(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.write("a", "workdir/a/main.py", "code", 0)
    nodes.write("a", "workdir/a/last.pt", "written")
    assert nodes.left("a") == ["workdir/a/last.pt"]


def test_the_summary_names_the_largest_files_and_where_they_are() -> None:
    sizes = {"a": 0, "b": 1000, "workdir/n/c": 2000, "workdir/n/checkpoint.pth.tar": 3000}
    files = [FileEntry(path, size, 1e9) for path, size in sizes.items()]
    said = str(summary([*files, *files], ["n"]))
    assert said == (
        "the program wrote 4 files to its output folder and its working directory (6 kB): checkpoint.pth.tar, c, b, "
        "...; launcher fetch --checkpoints brings them"
    )
    assert str(summary(files[:1], ["n"])).startswith("the program wrote 1 file to its output folder (0 B): a; ")
    one = str(Written(1, 5, ("x",), where=("working directory",)))
    assert one.endswith("(5 B): x; launcher fetch --checkpoints brings it")


def test_with_min_nodes_an_older_copy_here_does_not_stand_for_a_newer_checkpoint(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, min_nodes=2)
    for name in nodes.names:
        nodes.write(name, "checkpoints/last.pt", "1")
    nodes.fetch()
    nodes.write("b", "checkpoints/last.pt", "0", 0.9e9)
    nodes.write("c", "checkpoints/last.pt", "2", 1.1e9)
    assert [nodes.left(name) for name in nodes.names] == [[], [], ["checkpoints/last.pt"]]


def test_a_file_that_several_nodes_have_counts_once() -> None:
    """Copies keep the time, to the second."""
    found = summary([FileEntry("last.pt", 5, 100.25), FileEntry("last.pt", 5, 100.0)], ())
    assert (found.files, found.size) == (1, 5)


def test_what_grows_is_told_by_its_place() -> None:
    assert want("metrics.jsonl") == Want("metrics.jsonl", grows=True, text=True)
    assert want("tensorboard/metrics.jsonl") == Want("tensorboard/metrics.jsonl", grows=False)
    assert not is_programs("tensorboard/events.out.tfevents.1.checkpoint-7.41.0")  # the name of a host
