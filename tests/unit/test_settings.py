"""The settings file: what is wrong has its line, and what stops or cleans uses the rest."""

from __future__ import annotations

import os
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
        (
            "notify:\n  webhook: file:///x\n",
            ["2: notify.webhook: expected a URL such as https://chat.example.org/hooks/1,"],
        ),
        ("notify:\n  command: ['']\n", ["2: notify.command: expected a program as its first item, not ''"]),
        ("limits:\n  data_files: 0\n", ["2: limits.data_files: expected a number from 1 to 1000000000, not 0"]),
        (
            "clusters:\n  A: {kind: slurm, login: b, workdir: c, gpus: -1}\n",
            [
                "2: clusters.A.gpus: expected a number of GPUs from 0 to 1024, not -1",
                "2: clusters.A.workdir: expected an absolute path, not 'c'",
                "2: clusters.A: expected a name of at most 63 lower-case letters, digits and dashes, not 'A'",
            ],
        ),
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
        f"--on hcp: no such cluster in {file}; did you mean 'hpc'?\n  -> add it there: "
    )
    with pytest.raises(UsageError, match="known clusters: hpc\n"):
        read_settings({"XDG_CONFIG_HOME": str(tmp_path)}).cluster("dgx")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("https://x y/T0KEN", "without blanks"),
        ("https://x:abc/T0KEN", "its host or port is none"),
        ("https://x:99999/T0KEN", "its host or port is none"),
        ("http://[T0KEN/", "its host or port is none"),
        (f"http://{'T0KEN' * 50}/", "its host or port is none"),
        ("http://.T0KEN/", "its host or port is none"),
        ("https:///T0KEN", "it names no host"),
        ("https://bücher.example/T0KEN", "a host's name as xn--"),
        ("https://x/hööks/T0KEN", "in a path as %C3%BC"),
        ("https://ada:T0KEN@x/z", "a user and password before the host are not sent"),
        ("chat.example.org/T0KEN", "with http:// or https://"),
    ],
)
def test_a_webhook_that_cannot_be_one_is_refused_without_its_token(tmp_path: Path, address: str, why: str) -> None:
    file = written(tmp_path, f"# mine\nnotify:\n  webhook: '{address}'\n")
    with pytest.raises(UsageError) as caught:
        read_settings({"XDG_CONFIG_HOME": str(tmp_path)})
    assert str(caught.value).startswith(f"{file}:3: notify.webhook: expected a URL such as https://chat.example.org/")
    assert why in str(caught.value)
    assert "T0KEN" not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["", "http://localhost:8080", "https://[::1]:80/x?y=%C3%BC", "http://x_y.example/a#b"]
)
def test_a_webhook_that_may_be_one_is_taken(tmp_path: Path, address: str) -> None:
    written(tmp_path, f"notify: {{webhook: '{address}'}}\n")
    assert read_settings({"XDG_CONFIG_HOME": str(tmp_path)}).notify.webhook == address


def test_a_key_without_a_value_has_its_default(tmp_path: Path) -> None:
    written(
        tmp_path,
        "notify:\n#  webhook: x\nlimits: {file: }\nclusters:\n  hpc: {kind: slurm, login: a, workdir: /b, gpus: }\n",
    )
    settings = read_settings({"XDG_CONFIG_HOME": str(tmp_path)})
    assert (settings.notify.webhook, settings.limits.file, settings.clusters["hpc"].gpus) == ("", 4 << 30, None)


def test_what_another_user_could_have_written_is_refused_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "limits: {file: 1g}\n")
    file.chmod(0o620)
    with pytest.raises(UsageError, match="is writable by others") as caught:
        read_settings({"XDG_CONFIG_HOME": str(tmp_path)})
    assert caught.value.next_step == f"run: chmod 600 {file}"
    file.chmod(0o600)
    if os.geteuid() == 0:  # whose files are trusted
        os.chown(file, 4711, -1)
    owner = file.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    with pytest.raises(UsageError, match=rf"belongs to another user \(uid {owner}\)") as caught:
        read_settings({"XDG_CONFIG_HOME": str(tmp_path)})
    assert caught.value.next_step == f"read it, then run: sudo chown {owner + 1} {file}"


def test_a_pipe_is_no_settings_file_and_nothing_waits_for_it(tmp_path: Path) -> None:
    written(tmp_path, "").unlink()
    os.mkfifo(tmp_path / "launcher" / "settings.yaml", 0o600)
    with pytest.raises(UsageError, match="not a regular file"):
        read_settings({"XDG_CONFIG_HOME": str(tmp_path)})
