"""Secrets, in all that the launcher prints."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from rich.table import Table

import launcher
from launcher.api.jobs import plan
from launcher.cli import terminal
from launcher.cli.console import Screen
from launcher.records import masking
from launcher.records.masking import Masker, fsspec_values, hide, names_secret
from launcher.run.watch.messages import Output

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests, and these, have hidden."""
    monkeypatch.setattr(masking, "_hidden", frozenset())
    monkeypatch.setattr(masking, "_of_what_is_printed", Masker())


@pytest.mark.parametrize(
    "name",
    [
        "API_KEYS",
        "HF_TOKENS",
        "PASSWORDS",
        "KEYFILE",
        "DB_PASS",
        "MYSQL_PWD",
        "PGPASSWORD",
        "apiKeyFile",
        "REDIS_AUTH",
        "SSH_KEY_FILE",
        "token",
        "AWS_ACCESS_KEY_ID",
        "WANDB_API_KEY",
        "passphrase",
        "db-password",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "Authorization",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "PWD",
        "OLDPWD",
        "TOKENIZER",
        "TOKENIZERS_PARALLELISM",
        "KEYBOARD",
        "keyword",
        "GIT_ASKPASS",
        "SSH_AUTH_SOCK",
        "author",
        "passes",
        "compass",
        "bypass",
        "XAUTHORITY",
        "epochs",
        "secretary",
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not names_secret(name)


def test_of_fsspecs_settings_what_may_be_a_credential_is_secret() -> None:
    options = {
        "key": "k",
        "secret": "word",
        "config_kwargs": {"s3": {"addressing_style": "path"}},
        "client_kwargs": {"region_name": "us-east-1", "endpoint_url": "http://minio:9000", "verify": False},
    }
    found = {
        "FSSPEC_HTTPS": '{"headers": {"Authorization": "Bearer abc", "X-Who": "y"}, "timeout": 5}',
        "FSSPEC_S3": json.dumps(options),
        "FSSPEC_S3_ANON": "true",
        "FSSPEC_S3_SECRET": "another",
        "FSSPEC_FTP": '{"host": "files", "auth": ["me", "p4ss"]}',
        "FSSPEC_BROKEN": '{"a": "s3cr3t"',
        "OTHER": "not-fsspecs-9",
    }
    assert [*fsspec_values(found)] == ["Bearer abc", "y", "k", "word", "another", "me", "p4ss", '{"a": "s3cr3t"']


@pytest.mark.parametrize(
    ("secret", "text", "shown"),
    [
        ("Bearer t0k/en", "403 for t0k/en, ?token=t0k%2Fen", "403 for ***, ?token=***"),
        ('{"headers": {"Authorization": "Basic dXM6cHc="}}', "sent Basic dXM6cHc=: dXM6cHc=", "sent ***: ***"),
        ('{"type": "authorized_user", "refresh_token": "1//0abc"}', "the user 1//0abc", "the user ***"),
    ],
)
def test_parts_of_a_secret_are_masked(secret: str, text: str, shown: str) -> None:
    assert Masker([secret])(text) == shown


def test_whatever_is_printed_is_masked(capsys: pytest.CaptureFixture[str]) -> None:
    hide(["[t0p]-secret", 'with "quotes"'])
    said = 'a [t0p]-secret and with "quotes" end'
    table = Table("x")
    table.add_row("[t0p]-secret".replace("[", r"\["))
    terminal.say(said)
    terminal.say_json({"a": [said]})
    terminal.note(said)
    terminal.show_error(said)
    terminal.Reporter().warn(said)
    terminal.table_console().print(table)
    with Screen() as screen:
        screen.show(Output("a", b"a [t0p]-secret\n"))
        screen.log(said)
    out, err = capsys.readouterr()
    assert "secret" not in out + err
    assert "quotes" not in out + err
    assert (out.count("***"), err.count("***")) == (6, 8)


def test_a_job_hides_its_secrets_and_its_settings_of_fsspec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FSSPEC_HTTPS", '{"headers": {"X-Key": "of-the-caller"}}')
    (tmp_path / "a.py").touch()
    job = {"name": "x", "runtime": "process", "nodes": ["local"], "run": {"script": "a.py"}}
    loaded = launcher.load({**job, "env": {"FSSPEC_S3_SECRET": "of-the-job"}})
    terminal.say(plan(loaded, offline=True).to_json())
    terminal.say("of-the-caller")
    out = capsys.readouterr().out
    assert '"FSSPEC_S3_SECRET": "***"' in out
    assert "of-the" not in out


def test_only_one_module_writes_to_the_terminal() -> None:
    """But for the screen of a run, whose lines are masked, and what has no secrets: the exported text, which is run."""
    found = set()
    for path in [*(ROOT / "launcher/cli").glob("*.py"), *(ROOT / "launcher/features").glob("*/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("typer.echo", "print", "sys.stdout.write"):
                found.add(f"{path.stem}: {ast.unparse(node)}"[:40])
    assert {text for text in found if not text.startswith("terminal: ")} == {
        "console: sys.stdout.write(f'{(line if no",
        "main: typer.echo(__version__)",
        "main: print('; '.join(filter(None, ('lau",
        "plan: typer.echo(target(to).text(loaded,",
    }
