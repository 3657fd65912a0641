"""The settings file: what is wrong has its line, and what stops or cleans uses the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.job.settings import read_settings, use_valid_settings

HPC = "  hpc: {kind: slurm, login: local, workdir: /shared}\n"


def written(folder: Path, text: str) -> Path:
    file = folder / "launcher" / "settings.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(0o600)
    return file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("notfy: 1\n", ["1: notfy: unknown key; did you mean 'notify'?"]),
        (
            "limits:\n  wait: soon\n  filee: 1g\n",
            ["2: limits.wait: expected a duration", "3: limits.filee: unknown key; did you mean 'file'?"],
        ),
        ("notify:\n  command: ls\n", ["2: notify.command: expected a list, not 'ls'; put it in [...]"]),
        ("notify:\n  webhook: file:///x\n", ["2: notify.webhook: expected text of the form ^(https?://.+)?$, not "]),
        ("clusters:\n  a: {login: b}\n", ["2: clusters.a.kind: required key is missing; expected slurm or kubern"]),
        ("clusters:\n  a: {kind: slurm, login: b}\n", ["2: clusters.a.workdir: required key is missing"]),
        ("# mine\ndata_root: {a: b}\n", ["2: data_root: expected an absolute path, or a mapping of hosts to such"]),
        ("limits: 5\n", ["1: limits: expected a mapping with keys such as file, collect, answer, data_files, not 5"]),
        ("5\n", ["1: expected a mapping with keys such as notify, limits, clusters, data_root, not 5"]),
        ("limits: {file: 1g}\nlimits: {file: 2g}\n", ["2: limits: the key is given twice, first on line 1"]),
        ("clusters: [\n", ["2:1: not valid YAML: "]),
    ],
)
def test_every_mistake_has_its_line_and_what_is_expected(tmp_path: Path, text: str, expected: list[str]) -> None:
    file = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_settings({"XDG_CONFIG_HOME": str(tmp_path)})
    *lines, _ = str(caught.value).splitlines()
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(f"{file}:{start}")


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("notfy: 1\nlimits: {wait: 2m, answr: 1}\nclusters:\n" + HPC, (120, ["hpc"])),
        ("limits: {wait: soon}\nclusters:\n  bad: {kind: slurm}\n" + HPC, (60, ["hpc"])),
        ("clusters:\n" + HPC.replace("}", ", partion: gpu, options: [1]}"), (60, ["hpc"])),
        ("clusters:\n  bad: {login: a}\n  worse: 5\nlimits: {wait: 2m}\n", (120, [])),
        ("limits: {wait: 2m}\nclusters: [\n", (60, [])),
        ("- 5\n", (60, [])),
    ],
)
def test_what_stops_or_cleans_uses_what_is_valid_and_says_the_rest_once(
    tmp_path: Path, text: str, known: tuple[int, list[str]]
) -> None:
    environ, said = {"XDG_CONFIG_HOME": str(tmp_path)}, list[str]()
    file = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_settings(environ)
    use_valid_settings(environ, said.append)
    use_valid_settings(environ, said.append)
    settings = read_settings(environ)
    assert (settings.limits.wait, [*settings.clusters]) == known
    assert [line.partition("\n")[0] for line in said] == [str(caught.value).partition("\n")[0]]
    file.write_text("limits: {wait: 3m}\n")
    assert read_settings(environ).limits.wait == 180


def test_a_cluster_that_is_not_there_has_the_files_path_and_the_clusters_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = written(tmp_path, "clusters:\n" + HPC)
    with pytest.raises(UsageError) as caught:
        read_settings({"XDG_CONFIG_HOME": str(tmp_path)}).cluster("hcp")
    assert str(caught.value).startswith(
        f"--on hcp: no such cluster in {file}; known clusters: hpc\n  -> add it there: "
    )
