"""The same job again and again, and just after it was stopped: plain processes."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.cli import Cli


def containers(cli: Cli) -> list[str]:
    """Return the runs that have containers."""
    return sorted({folder.parents[1].name for folder in Path(cli.env["HOME"], ".launcher").glob("*/.node/*")})


def outputs(cli: Cli) -> list[str]:
    return sorted(folder.name for folder in Path(cli.env["HOME"], ".launcher").iterdir())


def test_containers_of_done_runs_go_but_for_the_newest_and_output_stays(home_cli: Cli) -> None:
    (home_cli.cwd / "work.sh").write_text("echo out; exit ${CODE:-0}\n")
    job = home_cli.job("work", runtime="process", nodes=["local"], run={"command": ["sh", "work.sh"]})
    other = home_cli.job("other", runtime="process", nodes=["local"], run={"command": ["sh", "work.sh"]})
    for file in (other, job, job):
        home_cli("up", file)
    first, *rest = (run.name for run in home_cli.runs())
    assert containers(home_cli) == sorted([first, *rest])
    third = home_cli("up", job)
    assert "1 earlier run that is done was taken down" in third.stderr
    runs = [run.name for run in home_cli.runs()]
    assert runs[1] not in containers(home_cli)
    assert containers(home_cli) == sorted([runs[0], *runs[2:]])
    assert set(runs) <= set(outputs(home_cli))
    assert home_cli("logs", runs[1]).stdout == "out\n"
    assert "taken down" in home_cli("up", job).stderr
    assert len(containers(home_cli)) == 3


def test_a_run_that_is_being_stopped_is_waited_for(home_cli: Cli) -> None:
    rest = home_cli.cwd / "rest"
    script = f"trap 'echo asked; until [ -e {rest} ]; do sleep 0.1; done; exit 0' TERM\necho ready\n"
    (home_cli.cwd / "slow.sh").write_text(f"[ ! -e {rest} ] || exit 0\n{script}while :; do sleep 0.1; done\n")
    job = home_cli.job("slow", runtime="process", nodes=["local", "local"], run={"command": ["sh", "slow.sh"]})
    home_cli("up", "-d", job)
    home_cli.until_logged("ready")
    refused = home_cli("up", job, code=3)
    assert "rendezvous port" in refused.stderr
    first = home_cli.runs()[0].name
    down = home_cli.start("down", first)
    while "asked" not in home_cli("logs", first, "--no-follow").stdout:
        assert down.poll() is None
    again = home_cli.start("up", job)
    assert again.stderr is not None
    while "waiting" not in (line := again.stderr.readline()):
        assert line, "launcher up ended before"
    rest.touch()
    assert down.communicate(timeout=120)[0] is not None
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, out + err
