"""What a node's home has: ~/.launcher as a link, Docker's proxies, sources of mounts below it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import JobInvalid, NodesFailed
from launcher.job.dump import dump_job
from launcher.job.files import check_files
from launcher.job.loader import parse_job
from launcher.model.container import Mount
from launcher.model.facts import EngineFacts, NodeFacts
from launcher.node.docker.values import container_request
from launcher.node.facts import collect
from launcher.node.machine import LocalMachine
from launcher.planning import cluster
from launcher.planning.allotment import refuse_unfit
from launcher.planning.checks import Level, output, output_room
from tests.unit.test_plan import job, node, planned

ENGINE = EngineFacts("id", "29.0.0", rootless=False, runtimes=(), cdi_devices=(), root_dir="/var/lib/docker")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    return folder


def facts() -> NodeFacts:
    return collect(LocalMachine("gpu-0", "ada"), "local").node


# --- ~/.launcher as a link


def test_the_real_folder_is_read_once(home: Path, tmp_path: Path) -> None:
    assert (facts().output_root, facts().output_broken) == ("", "")
    (home / ".launcher").mkdir()
    assert facts().output_root == str(home / ".launcher")
    (home / ".launcher").rmdir()
    (home / ".launcher").symlink_to(tmp_path / "disk")
    broken = facts()
    assert (broken.output_root, broken.output_broken) == ("", str(tmp_path / "disk"))
    (tmp_path / "disk").mkdir()
    assert (facts().output_root, facts().output_broken) == (str(tmp_path / "disk"), "")


def sources(found: NodeFacts, **keys: Any) -> dict[str, str]:
    """The mounts of the container, as its engine gets them: source by target."""
    spec = planned(job(1, mounts={}, **keys), [found]).master.container
    return {mount["Target"]: mount["Source"] for mount in container_request(spec)["HostConfig"]["Mounts"]}


def test_the_engine_mounts_what_the_link_leads_to() -> None:
    linked = node(0, output_root="/scratch/ada/runs")
    plan = planned(job(1), [linked])
    run = plan.run
    assert plan.master.container.output_dir == f"/home/ada/.launcher/{run}"  # as in labels and records
    expected = {"/output": f"/scratch/ada/runs/{run}", "/workspace/code": f"/scratch/ada/runs/{run}/workdir/gpu-0"}
    expected["/.launcher/cache"] = "/scratch/ada/runs/cache/111111111111-0"  # by image and machine
    assert sources(linked) == expected
    plain = {target: source.replace("/scratch/ada/runs", "/home/ada/.launcher") for target, source in expected.items()}
    assert sources(node(0, output_root="/home/ada/.launcher")) == sources(node(0)) == plain


def test_a_link_to_nowhere_is_refused() -> None:
    broken = node(0, engine=ENGINE, output_broken="/scratch/gone")
    with pytest.raises(NodesFailed) as refused:
        refuse_unfit(job(1), [broken])
    assert "/home/ada/.launcher is a link to /scratch/gone, which does not exist" in str(refused.value)
    assert "mkdir -p /scratch/gone" in str(refused.value)


def test_the_fix_is_a_line() -> None:
    old = "/home/ada/.launcher"
    line = f"mkdir -p {old} && mv {old} DISK/launcher && ln -s DISK/launcher {old}"
    full = node(0, engine=ENGINE, output_free=1 << 30)
    assert line in output_room(full, 50 << 30).fix
    assert line in output(replace(full, output_mount=replace(full.output_mount, noexec=True)))[0].fix


def test_docker_of_a_snap_with_a_link_to_a_folder_that_it_sees() -> None:
    snap = node(0, engine=replace(ENGINE, root_dir="/var/snap/docker/common/var-lib-docker"))
    for hidden in ("", "/home/ada/.launcher", "/scratch/runs", "/home/ada/.cache/runs"):
        with pytest.raises(NodesFailed, match="cannot mount hidden folders of a home"):
            refuse_unfit(job(1), [replace(snap, output_root=hidden)])
    seen = replace(snap, output_root="/home/ada/runs")
    refuse_unfit(job(1, mounts={}), [seen])
    refuse_unfit(job(1, mounts={"~/data": "/data"}), [seen])
    with pytest.raises(NodesFailed, match="shows containers another folder than the node's in place of /srv/data"):
        refuse_unfit(job(1, mounts={"/srv/data": "/data"}), [seen])


# --- sources of mounts


def test_a_source_in_the_home_is_that_of_each_node() -> None:
    found = [node(0), node(1, home="/users/ada")]
    plan = planned(job(2, mounts={"~/data": "/data:ro", "/srv": "/srv"}), found)
    assert [each.container.mounts for each in plan.nodes] == [
        (Mount(f"{home}/data", "/data", True), Mount("/srv", "/srv")) for home in ("/home/ada", "/users/ada")
    ]
    assert planned(job(1, mounts={"~": "/all"}), found[:1]).master.container.mounts == (Mount("/home/ada", "/all"),)


def test_a_source_in_the_home_is_kept_as_written_and_must_exist_here(home: Path) -> None:
    text = "name: j\nimage: {ref: i}\nnodes: [local]\nrun: {command: [a]}\nmounts: {~/a//data/: /data}\n"
    loaded = parse_job(text)
    assert loaded.mounts == (Mount("~/a/data", "/data"),)
    assert parse_job(dump_job(loaded)) == loaded
    with pytest.raises(JobInvalid, match=f"{home}/a/data does not exist on this machine"):
        check_files(loaded, home / "..", {})
    (home / "a" / "data").mkdir(parents=True)
    project = home / "project"
    project.mkdir()
    check_files(loaded, project, {})


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"mounts": {"~bob/data": "/data"}}, "expected an absolute path, starting with /"),
        ({"mounts": {"~/../x": "/data"}}, "expected a path without '..'"),
        ({"mounts": {"~/d": "/d"}, "runtime": "process", "nodes": ["local"]}, "plain processes access files directly"),
    ],
)
def test_sources_that_are_refused(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(JobInvalid, match=why):
        parse_job(json.dumps({"name": "j", "image": {"ref": "i"}, "nodes": ["a"], "run": {"command": ["a"]}, **keys}))


def test_a_cluster_has_no_known_home() -> None:
    with pytest.raises(JobInvalid, match="give the absolute path"):
        cluster.build(job(1, gpus="none", mounts={"~/data": "/data"}), "python3")


# --- proxies of Docker's configuration

CONFIG = {
    "auths": {"ghcr.io": {"auth": "c2VjcmV0"}},
    "proxies": {
        "default": {"httpProxy": "http://proxy:3128", "httpsProxy": "http://proxy:3129", "noProxy": "10.0.0.0/8,{x}"},
        "tcp://other:2375": {"httpProxy": "http://elsewhere:1"},
    },
    "credsStore": "pass",
}
PROXIES = (("HTTP_PROXY", "http://proxy:3128"), ("HTTPS_PROXY", "http://proxy:3129"), ("NO_PROXY", "10.0.0.0/8"))


@pytest.mark.parametrize("indent", [None, 2])
def test_proxies_are_read_and_nothing_else(home: Path, indent: int | None) -> None:
    (home / ".docker").mkdir()
    config = json.loads(json.dumps(CONFIG))
    config["proxies"]["default"]["noProxy"] = "10.0.0.0/8"
    (home / ".docker" / "config.json").write_text(json.dumps(config, indent=indent))
    assert facts().proxies == PROXIES
    printed = LocalMachine("gpu-0", "ada").script(Path(collect.__code__.co_filename).with_name("facts.sh").read_text())
    assert b"c2VjcmV0" not in printed.out


@pytest.mark.parametrize("text", ["", "{", '{"proxies": 1}', '{"proxies": {"default": []}}', '{"a": {"b": 1}}', "null"])
def test_other_configurations_have_no_proxies(home: Path, text: str) -> None:
    (home / ".docker").mkdir()
    (home / ".docker" / "config.json").write_text(text)
    assert facts().proxies == ()


def test_containers_have_the_proxies_of_their_node() -> None:
    plan = planned(job(2), [node(0, proxies=PROXIES), node(1)])
    first, second = (each.container.env for each in plan.nodes)
    for name, value in PROXIES:
        assert first[name] == first[name.lower()] == value
    assert not [name for name in second if "proxy" in name.lower()]


def test_the_jobs_own_proxies_are_used_instead() -> None:
    own = job(1, env={"http_proxy": "http://mine:1"}, secrets=["HTTPS_PROXY"])
    env = planned(own, [node(0, proxies=PROXIES)]).master.container.env
    assert {name: value for name, value in env.items() if "proxy" in name.lower()} == {
        "http_proxy": "http://mine:1",
        "NO_PROXY": "10.0.0.0/8",
        "no_proxy": "10.0.0.0/8",
    }


def test_a_proxy_with_a_password_is_not_recorded_and_that_is_said() -> None:
    plan = planned(job(1), [node(0, proxies=(("HTTP_PROXY", "http://ada:hush@proxy:3128"),))])
    assert "hush" not in plan.to_json()
    assert any("HTTP_PROXY of its ~/.docker/config.json has a password" in warning for warning in plan.warnings)
    secret = planned(job(1, secrets=["HTTP_PROXY"]), [node(0, proxies=(("HTTP_PROXY", "http://ada:hush@proxy:3128"),))])
    assert not [warning for warning in secret.warnings if "PROXY" in warning]
    other = planned(job(1), [node(0, proxies=(("HTTP_PROXY", "http://proxy:3128/@"),))])  # without a user
    assert other.master.container.env["HTTP_PROXY"] == "http://proxy:3128/@"


def test_broken_homes_are_a_failure_of_doctor() -> None:
    assert [check.level for check in output(node(0, output_broken="/gone"))] == [Level.FAIL]
