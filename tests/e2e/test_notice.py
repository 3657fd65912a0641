"""The notification at the end of a run: configured in the user's settings, never in a job file."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.cli import Cli
from tests.hook import GARBAGE, hook

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def noticed_cli(cli: Cli, tmp_path: Path) -> Iterator[Cli]:
    """Return the launcher with a temporary home folder."""
    (tmp_path / "home" / ".config" / "launcher").mkdir(parents=True)
    local = Cli(cli.cwd, {**cli.env, "HOME": str(tmp_path / "home"), "XDG_CONFIG_HOME": ""})
    yield local
    local("down", "--all", code=None)


def write_settings(cli: Cli, mode: int = 0o600, **notify: Any) -> Path:
    file = Path(cli.env["HOME"], ".config", "launcher", "settings.yaml")
    file.write_text(yaml.safe_dump({"notify": notify}))
    file.chmod(mode)
    return file


def job(cli: Cli, command: str, **keys: Any) -> Path:
    return cli.job("ends", runtime="process", nodes=["local"], run={"command": ["sh", "-c", command]}, **keys)


@pytest.fixture
def posted() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run a webhook. Return its address, and the requests that it received."""
    got: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if self.path == "/broken" else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    server.server_close()


def test_a_command_and_a_webhook_are_notified_of_the_end(
    noticed_cli: Cli, posted: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    address, got = posted
    file = str(tmp_path / "notified")
    program = f"import os, sys; open({file!r}, 'w').write(os.environ['LAUNCHER_STATE'] + sys.stdin.read())"
    write_settings(noticed_cli, command=[sys.executable, "-c", program], webhook=address)
    noticed_cli("up", job(noticed_cli, "echo secret words; exit 3"), code=1)
    run = noticed_cli.runs()[-1].name
    assert [(notice["run"], notice["state"], notice["exit_code"]) for notice in got] == [(run, "failed", 1)]
    assert "local exited with code 3" in got[0]["text"]
    assert "secret words" not in json.dumps(got)
    assert Path(file).read_text() == "failed" + json.dumps(got[0])


def test_the_command_that_sees_a_detached_run_end_notifies_once(
    noticed_cli: Cli, posted: tuple[str, list[dict[str, Any]]]
) -> None:
    address, got = posted
    write_settings(noticed_cli, webhook=address)
    noticed_cli("up", "-d", job(noticed_cli, "sleep 1; echo done"))
    assert got == []
    noticed_cli("logs")
    noticed_cli("logs")
    assert [notice["state"] for notice in got] == ["done"]


def _until_begun(process: Any) -> None:
    while process.stdout.readline() != "begun\n":
        assert process.poll() is None


def test_of_two_commands_that_see_the_end_one_notifies(
    noticed_cli: Cli, posted: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    address, got = posted
    write_settings(noticed_cli, webhook=address)
    go = tmp_path / "go"
    following = [
        noticed_cli.start("up", job(noticed_cli, f"echo begun; until [ -e {go} ]; do sleep 0.1; done; exit 3"))
    ]
    _until_begun(following[0])
    following += [noticed_cli.start("logs") for _ in range(2)]
    for process in following[1:]:
        _until_begun(process)
    go.touch()
    for process in following:
        process.communicate(timeout=120)
        assert process.returncode == 1
    assert [notice["state"] for notice in got] == ["failed"]


def test_a_notification_masks_a_secret_as_the_screen_does(
    noticed_cli: Cli, posted: tuple[str, list[dict[str, Any]]]
) -> None:
    address, got = posted
    write_settings(noticed_cli, webhook=address)
    cli = Cli(noticed_cli.cwd, {**noticed_cli.env, "TOKEN": "hunter2-hunter2"})
    program = "import os; raise ValueError('rejected: ' + os.environ['TOKEN'])"
    run = {"command": ["python3", "-c", program]}
    cli("up", cli.job("ends", runtime="process", nodes=["local"], run=run, secrets=["TOKEN"]), code=1)
    assert got[0]["text"].endswith("ValueError: rejected: ***")


def test_a_failed_notification_is_reported_and_changes_nothing(
    noticed_cli: Cli, posted: tuple[str, list[dict[str, Any]]]
) -> None:
    write_settings(noticed_cli, command=["false"], webhook=posted[0] + "/broken")
    done = noticed_cli("up", job(noticed_cli, "true"))
    assert "notification failed: notify.command false: exit code 1" in done.stderr
    assert "notification failed: notify.webhook: HTTP status 500" in done.stderr
    assert posted[0] not in done.stderr


def test_an_answer_that_is_not_http_changes_neither_outcome_nor_clean_up(noticed_cli: Cli) -> None:
    with hook(GARBAGE) as served:
        write_settings(noticed_cli, webhook=served.address)
        done = noticed_cli("up", job(noticed_cli, "true"))
        failed = noticed_cli("up", job(noticed_cli, "exit 3"), code=1)
        assert not Path(noticed_cli.env["HOME"], ".launcher", noticed_cli.runs()[-1].name, ".node").exists()
        swept = noticed_cli("up", job(noticed_cli, "true", sweep=[{"a": 1}, {"a": 2}]))
    for ended, count in ((done, 1), (failed, 1), (swept, 2)):
        assert ended.stderr.count("warning: notification failed: notify.webhook: its answer") == count
        assert "unexpected" not in ended.stderr
    assert "local exited with code 3" in failed.stderr


def test_ctrl_c_while_a_webhook_is_slow_tells_how_the_run_ended(noticed_cli: Cli) -> None:
    with hook(b"H", drips=True) as served:
        write_settings(noticed_cli, webhook=served.address)
        up = noticed_cli.start("up", job(noticed_cli, "exit 3"))
        assert served.asked.wait(60)
        up.send_signal(signal.SIGINT)
        _, err = up.communicate(timeout=60)
    assert up.returncode == 1, err
    assert "still running" not in err
    assert "local exited with code 3" in err
    assert noticed_cli.result()["state"] == "failed"
    assert not [*Path(noticed_cli.env["HOME"], ".launcher").glob("*/.node")]  # cleaned up before it was announced


def test_ctrl_c_in_a_sweep_does_not_call_a_variant_running_that_is_being_announced(noticed_cli: Cli) -> None:
    with hook(b"H", drips=True) as served:
        write_settings(noticed_cli, webhook=served.address)
        pool = {"nodes": {"pool": ["local"], "each": 1}, "sweep": [{"a": 1}]}
        up = noticed_cli.start("up", noticed_cli.job("ends", runtime="process", run={"command": ["true"]}, **pool))
        assert served.asked.wait(60)
        up.send_signal(signal.SIGINT)
        _, err = up.communicate(timeout=60)
    assert "still running" not in err
    assert noticed_cli.result()["state"] == "done"


def test_invalid_or_writable_settings_are_refused_before_anything_starts(noticed_cli: Cli) -> None:
    here = job(noticed_cli, "true")
    file = write_settings(noticed_cli, webhok="x")
    assert f"{file}:2: notify.webhok: unknown key; did you mean 'webhook'?" in noticed_cli("up", here, code=2).stderr
    write_settings(noticed_cli, webhook="file:///etc/passwd")
    assert "notify.webhook" in noticed_cli("up", here, code=2).stderr
    write_settings(noticed_cli, mode=0o622, command=["true"])
    assert "is writable by others" in noticed_cli("up", here, code=2).stderr
    assert noticed_cli.runs() == []


@pytest.mark.parametrize("text", ["notfy: 1\nlimits: {wiat: 5m}\n", "notify: [\n"])
def test_an_invalid_settings_file_does_not_stand_between_a_run_and_its_end(noticed_cli: Cli, text: str) -> None:
    noticed_cli("up", "-d", job(noticed_cli, "sleep 1000"))
    file = write_settings(noticed_cli)
    file.write_text(text)
    for command in (("down",), ("down", "--all"), ("clean", "--yes")):
        assert f"warning: {file}:" in noticed_cli(*command).stderr
    assert noticed_cli.result()["state"] == "stopped"
    assert f"error {file}:" in noticed_cli("up", job(noticed_cli, "true"), code=2).stderr
    file.unlink()


def test_a_job_file_cannot_set_a_notification(noticed_cli: Cli, tmp_path: Path) -> None:
    file = job(noticed_cli, "true", notify={"command": ["touch", str(tmp_path / "touched")]})
    assert "notify: unknown key" in noticed_cli("up", file, code=2).stderr
    assert not (tmp_path / "touched").exists()
