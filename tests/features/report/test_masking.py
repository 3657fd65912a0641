"""What a report hides, and what it keeps."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.features.report.masking import Anonymous, Names, secret_values

NAMES = Names(
    secrets=["s3cr3t/@x", "two\nlines"],
    users=["erika", "max", "root"],
    homes=["/srv/people/erika", "/data/home/erika", "/root"],
    nodes=[["gpu-a", "gpu-a.corp.example", "10.0.0.5"], ["node-1", "10.0.0.6"]],
    hosts=["vm", "registry.corp.example"],
    keys=["/keys/acme"],
)


def test_a_login_that_is_a_word_of_the_launcher_is_replaced_where_it_looks_like_one() -> None:
    names = Names(users=["erika", "trainer"], homes=["/home/trainer", "/data/trainer"], nodes=[["gpu-a"], ["torch"]])
    mask = Anonymous(names)
    for text, shown in (
        ("/home/trainer/.launcher/x", "/home/user-1/.launcher/x"),
        ("/data/trainer/x", "/home/user-3/x"),
        ("trainer@gpu-a, Trainer@torch", "user-1@node-1, user-1@torch"),
        ("Docker 29.1, overlay2, user trainer may use it", "Docker 29.1, overlay2, user user-1 may use it"),
        ("python3 -m launcher.trainer train: trainer", "python3 -m launcher.trainer train: trainer"),
    ):
        assert mask.text(text) == shown
        assert not mask.leaks(mask.text(text))
    assert mask.kept == ["torch", "trainer"]
    assert Anonymous(NAMES).kept == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("erika@gpu-a and Erika@10.0.0.5", "user-1@node-1 and user-1@node-1-address"),
        ("/data/home/erika/x, /home/erika, /home/klaus/y", "/home/user-1/x, /home/user-1, /home/user-4/y"),
        ("/srv/people/erika/x", "/home/user-3/x"),
        ("max --max_restarts root", "user-2 --max_restarts root"),
        ("gpu-b.corp.example node-1 vm:1:2 vm2", "gpu-b.domain-1 node-2 host-1:1:2 vm2"),
        ("vm:12:13 [0] NCCL INFO [0]eth0:10.0.0.7<0>", "host-1:12:13 [0] NCCL INFO [0]eth0:address-1<0>"),
        ("other:12:13 [0] NCCL INFO x", "host-3:12:13 [0] NCCL INFO x"),
        ("events.out.tfevents.1795805353.other.7.0", "events.out.tfevents.1795805353.host-3.7.0"),
        ("http://u:p@other:80/x?token=abc&y=1", "http://***@host-3:80/x?token=***&y=1"),
        ("s3://bucket/x https://github.com/x", "s3://host-3/x https://github.com/x"),
        ("fe80::1%eth0 ::1 127.0.0.1 [2001:db8::2]:80", "address-1%eth0 ::1 127.0.0.1 [address-2]:80"),
        ("12:34:56 c10d::Store std::string 0000:07:00.0", "12:34:56 c10d::Store std::string 0000:07:00.0"),
        ("NCCL version 2.21.5.1, nvidia-cublas==12.4.5.8", "NCCL version 2.21.5.1, nvidia-cublas==12.4.5.8"),
        ("Acc@1 6.56 nvcr.io/x@sha256:0123 max_tokens: 4", "Acc@1 6.56 nvcr.io/x@sha256:0123 max_tokens: 4"),
        ("~/.ssh/corp /keys/acme /x/id_ed25519, KeyError", "~/.ssh/*** ~/.ssh/*** ~/.ssh/***, KeyError"),
        ("WANDB_API_KEY=12 'password': 'x y' Bearer abc", "WANDB_API_KEY=*** 'password': *** Bearer ***"),
        ("hf_0123456789abcdef s3cr3t/@xs3cr3t/@x", "*** ******"),
        ("API_KEYS=a,b HF_TOKENS=xy PASSWORDS: p KEYFILE=/k", "API_KEYS=*** HF_TOKENS=*** PASSWORDS: *** KEYFILE=***"),
        ("DB_PASS=x MYSQL_PWD=y SSHPASS=z KEY_PROD=q", "DB_PASS=*** MYSQL_PWD=*** SSHPASS=*** KEY_PROD=***"),
        ("PWD=/x OLDPWD=/y BYPASS=1 MAX_TOKENS=2k", "PWD=/x OLDPWD=/y BYPASS=1 MAX_TOKENS=2k"),
        ("tokens=12.5k forward_pass: 3.2 ms pad_token_id: 0", "tokens=12.5k forward_pass: 3.2 ms pad_token_id: 0"),
        ("TOKENIZERS_PARALLELISM=false --tokenizer x", "TOKENIZERS_PARALLELISM=false --tokenizer x"),
        ("a.py --password X --lr 1 --db-pass=Y", "a.py --password *** --lr 1 --db-pass=***"),
        ('a.py --api-key "Y z" --n-tokens 4', "a.py --api-key *** --n-tokens 4"),
        (r'sh -c "a.py --api-key \"Y z\" x"', 'sh -c "a.py --api-key *** x"'),
        ("Authorization: Basic dXM6cHc=", "Authorization: ***"),
        ("curl -H 'authorization: token abc def' x", "curl -H 'authorization: ***' x"),
        ("Basic dXNlcjpwdzE=, Basic training", "Basic ***, Basic training"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIi.SflKxw x", "*** x"),
        ("nvapi-0123456789abcd AIzaSyA0123456789a ASIA0123456789ABCDEF", "*** *** ***"),
        ("POST https://hooks.slack.com/services/T0/B0/X done", "POST https://host-3/*** done"),
        ("http://u:p@chat:80/webhooks/1?x=2", "http://host-3:80/***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nx\n-----END RSA PRIVATE KEY-----.", "***."),
    ],
)
def test_what_is_replaced(text: str, shown: str) -> None:
    assert Anonymous(NAMES).text(text) == shown


def test_values_are_hidden_by_the_names_of_their_keys() -> None:
    job = "env: {HF_TOKEN: abc, MAX_TOKENS: 2048, PW_PASSWORD: 7}\nport: 29500\nargs: ['--api-key', x]\n"
    shown = yaml.safe_load(Anonymous(NAMES).file("job.yaml", job))
    assert shown["env"] == {"HF_TOKEN": "***", "MAX_TOKENS": 2048, "PW_PASSWORD": "***"}
    assert shown["port"] == 29500
    assert json.loads(Anonymous(NAMES).file("x.json", json.dumps({"env": {"A_KEY": "b", "B": None}}))) == {
        "env": {"A_KEY": "***", "B": None}
    }
    assert [*secret_values({"nodes": [{"argv": ["--api-key", "x1", "--lr", "1"]}, {"A_SECRET": "y"}]})] == ["x1", "y"]


def test_secrets_in_a_command_are_replaced_wherever_they_are() -> None:
    command = "train --password hunter; API_KEYS='q w' x --api-key \"Y\" --token $T --max-tokens 512"
    assert [*secret_values({"command": ["sh", "-c", command]})] == ["hunter", "q w", "Y"]
    assert "hunter" not in Anonymous(Names(secrets=[*secret_values(command)])).text("it is hunter")
    assert yaml.safe_load(Anonymous(NAMES).file("job.yaml", "args: [-x, --api-key, y, z]"))["args"][2] == "***"


def test_a_name_that_was_recognised_once_is_replaced_everywhere() -> None:
    mask = Anonymous(Names())
    files = [
        ("job.yaml", "run: {args: {user: alice, host: depot, data: data}}"),
        ("logs/alice.log", "alices Alice's run-alice minio"),
        (
            "plan.json",
            json.dumps({"env": {"HOME": "/home/alice", "A": "/home/data/x ftp://minio:9000/x s3://depot/y"}}),
        ),
    ]
    mask.learn(files)
    shown = [(mask.text(name), mask.file(name, text)) for name, text in files]
    assert yaml.safe_load(shown[0][1])["run"]["args"] == {"user": "user-1", "host": "host-2", "data": "data"}
    assert shown[1] == ("logs/user-1.log", "alices user-1's run-user-1 host-1")
    assert json.loads(shown[2][1])["env"] == {
        "HOME": "/home/user-1",
        "A": "/home/user-2/x ftp://host-1:9000/x s3://host-2/y",
    }


def test_a_key_that_is_not_valid_json_or_yaml_is_masked_as_text() -> None:
    assert Anonymous(NAMES).file("plan.json", '{"a": "erika').strip() == '{"a": "user-1'
    assert Anonymous(NAMES).file("job.yaml", "a: [erika") == "a: [user-1"


ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
LETTERS = st.sampled_from("kqvwxyzäß")


@given(
    secret=st.text(st.sampled_from("abAB01/@:.+-_'\"\\ \n=é"), min_size=8, max_size=30).filter(str.strip),
    user=st.text(LETTERS, min_size=5, max_size=12),
    around=st.lists(ANY, min_size=4, max_size=4),
    form=st.sampled_from(
        ["{}", "{}@gpu-a", "http://{}:x@y/z", "/home/{}/x", "export X_TOKEN={}", "/x/.ssh/{}", "k={}"]
    ),
)
def test_no_secret_and_no_user_is_left_anywhere(secret: str, user: str, around: list[str], form: str) -> None:
    mask = Anonymous(Names(secrets=[secret], users=[user]))
    text = f"{around[0]}{form.format(secret)}{around[1]}{user}{around[2]}{form.format(user)}{around[3]}"
    value = {"env": {"A": text, text: [text]}, secret: 1, user: 2}
    for name, written in (
        ("x.log", text),
        ("x.json", json.dumps(value)),
        ("x.jsonl", f"{json.dumps(value)}\n{text}\n"),
        ("job.yaml", yaml.safe_dump(value)),
    ):
        shown = mask.file(name, written)
        if not mask.leaks(shown):  # else the file is left out
            assert secret not in shown
            assert user not in shown.lower()
    assert not mask.leaks(mask.text(text))
