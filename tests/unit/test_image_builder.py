"""Names of images, and how they follow from an image's inputs."""

import dataclasses

import pytest

from launcher.errors import ImageBuildFailed
from launcher.image import names
from launcher.image.builder import Repair, buildx_argv, context_archive, pip_authority, pip_index
from launcher.image.lock import Lock
from launcher.model.facts import ImageInfo

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("nvcr.io/nvidia/pytorch:26.09-py3", ("nvcr.io", "nvidia/pytorch", "26.09-py3", "")),
        (f"nvcr.io/nvidia/pytorch:26.09-py3@{DIGEST}", ("nvcr.io", "nvidia/pytorch", "26.09-py3", DIGEST)),
        ("pytorch/pytorch", ("", "pytorch/pytorch", "", "")),
        ("localhost:5000/x:1", ("localhost:5000", "x", "1", "")),
        ("debian", ("", "debian", "", "")),
    ],
)
def test_parts_of_a_reference(text, parts):
    found = names.parse(text)
    assert (found.registry, found.name, found.tag, found.digest) == parts


@pytest.mark.parametrize("text", [DIGEST, "a" * 64, "0123456789ab", "UPPER/case", "x:bad tag", "x@sha256:short", ""])
def test_references_that_no_registry_can_have(text):
    assert not names.in_registry(text)


def test_our_own_names_are_in_no_registry():
    assert not names.in_registry("launcher/demo:0123")
    assert names.in_registry("registry.example/launcher/demo:0123")


BASE, WHY = "nvcr.io/nvidia/pytorch:26.09-py3", "VGG without adaptive pool"
INFO = ImageInfo(id=DIGEST, tags=(), repo_digests=(), arch="amd64", entrypoint=(), labels={}, layers=(), size=0)
DECIDED = Lock(
    base=BASE, torchvision_asked="auto", packages=("six", "attrs>=20"), base_id=DIGEST, base_digest=DIGEST, user="",
    torch="2.14.1+cu130", torchvision="0.29.1", step="wheel 0.29.1 cu130", why=WHY, image="", image_id="",
)  # fmt: skip
REPAIR = Repair(None, INFO, DECIDED)


def test_equal_inputs_give_equal_names_and_different_inputs_different_names(monkeypatch):
    others = [
        dataclasses.replace(REPAIR, info=dataclasses.replace(INFO, id="sha256:" + "b" * 64)),
        dataclasses.replace(REPAIR, lock=dataclasses.replace(DECIDED, step="keep")),
        dataclasses.replace(REPAIR, lock=dataclasses.replace(DECIDED, packages=("six",))),
        dataclasses.replace(REPAIR, info=dataclasses.replace(INFO, user="1000")),
    ]
    assert len({REPAIR.digest, *(other.digest for other in others)}) == 5
    before = REPAIR.tag("demo")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")  # how the index is reached does not count
    assert REPAIR.arguments("x")["PIP_INDEX_URL"] == "https://mirror.example/simple"
    assert REPAIR.tag("demo") == before


def test_an_image_of_the_trainer_has_its_decoder():
    lock = dataclasses.replace(DECIDED, step="keep", packages=(), decoder=True)
    with_decoder = Repair(None, INFO, lock, roi="int roi;")
    assert not with_decoder.changes_nothing
    assert Repair(None, INFO, dataclasses.replace(lock, decoder=False), roi="int roi;").changes_nothing
    assert len({with_decoder.digest, Repair(None, INFO, lock, roi="int other;").digest, REPAIR.digest}) == 3
    files = with_decoder.files()
    assert files["roi.c"] == "int roi;"
    assert "decoder.sh" in files
    stages = [line for line in files["Dockerfile"].splitlines() if line.startswith("FROM ")]
    assert stages == ["FROM ${BASE_IMAGE} AS decoder", "FROM ${BASE_IMAGE}"]
    assert files["Dockerfile"].endswith("COPY --from=decoder /opt/launcher/decoder /opt/launcher/decoder\n")
    assert "decoder" not in " ".join(REPAIR.files())


@pytest.fixture
def plain_pip(monkeypatch):
    for name in ("PIP_CERT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST"):
        monkeypatch.delenv(name, raising=False)


def test_the_command_line_of_a_build(plain_pip):
    argv = buildx_argv("launcher/demo:1", REPAIR.arguments("launcher/base:1"), {"a": "b c"}, "host", "default")
    assert argv == [
        *("docker", "buildx", "build", "--builder", "default", "--load", "--progress", "plain"),
        *("--tag", "launcher/demo:1", "--network", "host"),
        *("--build-arg", "BASE_IMAGE=launcher/base:1", "--build-arg", "TORCHVISION=wheel 0.29.1 cu130"),
        *("--build-arg", "RUN_USER=root", "--label", "a=b c", "-"),
    ]


def test_a_context_is_the_same_bytes_each_time(plain_pip):
    assert context_archive(REPAIR.files()) == context_archive(dict(reversed(REPAIR.files().items())))
    assert REPAIR.files()["requirements.txt"] == "six\nattrs>=20\n"


def test_labels_say_where_it_comes_from_and_why():
    found = REPAIR.labels("demo")
    assert found["org.opencontainers.image.base.name"] == BASE
    assert found["org.opencontainers.image.base.digest"] == DIGEST
    assert found["launcher.image.torchvision"] == "0.29.1"
    assert found["launcher.image.why"] == WHY


def test_a_password_in_the_index_address_is_refused_because_the_image_would_reveal_it():
    with pytest.raises(ImageBuildFailed, match="PIP_INDEX_URL") as refusal:
        pip_index({"PIP_INDEX_URL": "https://user:hunter2@index.example/simple"})
    assert "hunter2" not in str(refusal.value)
    assert pip_index({"PIP_INDEX_URL": "https://index.example/simple", "PIP_EXTRA_INDEX_URL": " "}) == (
        ("PIP_INDEX_URL", "https://index.example/simple"),
    )


def test_the_callers_pip_certificates_are_used(tmp_path):
    (tmp_path / "ca").write_text("PEM")
    assert pip_authority({"PIP_CERT": str(tmp_path / "ca")}) == "PEM"
    assert pip_authority({}) == ""
    with pytest.raises(ImageBuildFailed, match="PIP_CERT"):
        pip_authority({"PIP_CERT": str(tmp_path / "missing")})
