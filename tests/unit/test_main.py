"""The entry point: exceptions that end the program without a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.cli import main
from launcher.errors import StoppedByUser


def test_ctrl_c_wrapped_in_a_librarys_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def app() -> None:
        raise ValueError("Error building `model` serializer:\n  KeyboardInterrupt: ")

    monkeypatch.setattr(main, "app", app)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == StoppedByUser.exit_code


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def app() -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(main, "app", app)
    with pytest.raises(ValueError, match="no such thing"):
        main.main()


def test_ctrl_c_before_the_start_of_a_run_has_the_exit_code_of_stopped(tmp_path: Path) -> None:
    began = tmp_path / "began"
    config = tmp_path / "ssh_config"
    config.write_text(f"Host *\n ProxyCommand touch {began} && exec sleep 60\n")
    job = tmp_path / "job.yaml"
    job.write_text("name: job\nimage: {ref: x}\nnodes: [silent]\nrun: {command: ['true']}\ncode: code\n")
    (tmp_path / "code").mkdir()
    argv = [sys.executable, "-m", "launcher", "up", "job.yaml", "--ssh-config", str(config)]
    up = subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not began.exists():
        assert up.poll() is None, up.communicate()[1]
        time.sleep(0.05)
    up.send_signal(signal.SIGINT)
    messages = up.communicate(timeout=30)[1]
    assert up.returncode == StoppedByUser.exit_code, messages
    assert "Traceback" not in messages
