"""User errors: one clear line, exit code 2, nothing written."""

import ctypes
import errno
import io
import json
import os
import re
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.train.runs import DIGITS, digit_tree, finish, start
from train.__main__ import main
from train.checkpoint import Saver, read

BY_RANK = ("tests/train/programs/by_rank.py",)
QUICK = [
    "--arch",
    "smallcnn",
    "--image-size",
    "8",
    "--epochs",
    "1",
    "--batch-size",
    "8",
    "--workers",
    "1",
    "--device",
    "cpu",
    "--threads",
    "1",
]


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    made = digit_tree(tmp_path / "data", 24, 12)
    yield made
    for folder in (made / "train").glob("0"):  # unreadable_folder; pytest removes it later
        folder.chmod(0o700)


def empty(data: Path) -> Path:
    (data.parent / "empty").mkdir()
    return data.parent / "empty"


def one_class(data: Path) -> Path:
    folder = digit_tree(data.parent / "one", 24, 12)
    for split in ("train", "val"):
        for path in (folder / split).iterdir():
            if path.name != "0":
                for image in path.iterdir():
                    image.unlink()
                path.rmdir()
    return folder


def class_without_images(data: Path) -> Path:
    (data / "train" / "ten").mkdir()
    return data


def no_validation(data: Path) -> Path:
    (data / "val").rename(data / "test")
    return data


def unknown_class(data: Path) -> Path:
    (data / "val" / "0").rename(data / "val" / "zero")
    return data


def text_named_jpg(data: Path) -> Path:
    (data / "train" / "0" / "readme.jpg").write_text("not an image\n" * 50)
    return data


def broken_archive(data: Path) -> Path:
    path = data.parent / "broken.tar"
    path.write_bytes(b"no tar at all" * 100)
    return path


def archive_of_something_else(data: Path) -> Path:
    path = data.parent / "other.tar"
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("notes.txt"), io.BytesIO())
    return path


def loop_of_links(data: Path) -> Path:
    (data / "train" / "0" / "more").symlink_to(data / "train" / "1")
    (data / "train" / "1" / "more").symlink_to(data / "train" / "0")
    return data


def link_to_itself(data: Path) -> Path:
    (data / "train" / "self").symlink_to("self")
    return data


def unreadable_folder(data: Path) -> Path:
    (data / "train" / "0").chmod(0)
    return data


def short_packed_file(data: Path) -> Path:
    (data.parent / "short.pack").write_bytes(b"TRNPACK2" + bytes(8))
    return data.parent / "short.pack"


def shard_that_is_a_pipe(data: Path) -> Path:
    folder = empty(data)
    (folder / "val.tar").touch()
    os.mkfifo(folder / "train.tar")
    return folder


@pytest.fixture
def without_roots_rights() -> Iterator[None]:
    """Drop the capability of root to read any file (capabilities(7)), in this thread and those that it starts."""
    libc, before, header = ctypes.CDLL(None), (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert libc.capget(header, before) == 0
    now = (ctypes.c_uint32 * 6)(*before)
    now[0] &= ~0b110  # of the effective ones: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, now) == 0
    yield
    assert libc.capset(header, before) == 0


@pytest.mark.usefixtures("without_roots_rights")
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda data: data / "absent", "no such file or folder"),
        (loop_of_links, "train/0/more/more: a link to one of its parent folders; remove the link"),
        (link_to_itself, "train/self cannot be read: Too many levels of symbolic links"),
        (unreadable_folder, "train/0 cannot be read: Permission denied"),
        (short_packed_file, "damaged or incomplete"),
        (shard_that_is_a_pipe, "train.tar cannot be read: not a regular file"),
        (empty, "no class folders in train/"),
        (one_class, "only one class"),
        (class_without_images, "no images in train/ten"),
        (no_validation, "no class folders in val/"),
        (unknown_class, "val/zero is not a class in train/"),
        (text_named_jpg, "readme.jpg: not an image"),
        (broken_archive, "not an uncompressed tar archive"),
        (archive_of_something_else, "no images in the archive"),
    ],
)
def test_data(
    make: Callable[[Path], Path], says: str, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "output"
    assert main(["--data", str(make(data)), "--output", str(output), *QUICK]) == 2
    errors = capfd.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("train: error: ")
    assert says in errors[0]
    assert not (output / "checkpoints").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--arch resnet5O", "closest: resnet50"),
        ("--batchsize 3 --lrr 2", "--batchsize: no such option; closest: --batch-size; --lrr: no such option; closest"),
        ("--epochs many", "--epochs: invalid int value: 'many'"),
        ("--amp fp8", "--amp: invalid choice: 'fp8'"),
        ("more", "unrecognized arguments: more"),
        ("--batch-size 25", "use a batch size of 24 or less"),
        ("--batch-size 0", "must be at least 1"),
        ("--lr -1", "must be greater than 0"),
        ("--flip 1.5", "at most 1"),
        ("--phases 160", "must have the form SIZE@FRACTION"),
        ("--phases 0@0.5", "the size must be at least 8"),
        ("--arch vit_b_16 --image-size 32", "does not accept images of 32 px"),
        ("--arch inception_v3 --image-size 32", "does not accept images of 32 px"),
        ("--arch alexnet --image-size 224 --phases 16@0", "does not accept images of 16 px"),
        ("--model-kwargs dropout=0.1", "--arch smallcnn has no options"),
        ("--arch resnet18 --model-kwargs dropuot=0.1", "does not accept them"),
        ("--arch resnet18 --model-kwargs width_per_group=128", "only supports groups=1"),
        ("--model-kwargs dropout", "must have the form NAME=VALUE"),
        ("--syncbn library --device cpu", "works on GPUs only"),
        ("--dtype float64 --amp bf16", "mixed precision needs float32"),
        ("--resume /nowhere/last.pt", "no such checkpoint"),
    ],
)
def test_options(options: str, says: str, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "output"
    assert main(["--data", str(data), "--output", str(output), *QUICK, *options.split()]) == 2
    errors = capfd.readouterr().err.splitlines()
    assert len(errors) == 1
    assert says in errors[0]
    assert not output.exists()


@pytest.mark.parametrize("local_rank", ["0", "1"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--dta x", "--dta: no such option; closest: --data"),  # not: --data is required
        ("--data x --parallel fsdp --compile --compile-mode max-autotune", "--parallel fsdp with --compile-mode max-a"),
        ("--data x --parallel single", "--parallel single runs one process, not 2"),
        ("--data x --parallel hsdp", "--parallel hsdp needs two or more nodes, and here is one; use fsdp"),
        ("--data {data} --parallel dual_batch --schedule multistep --dual-small 5", "small 5: must be 0 to 1, the num"),
        ("--data x --parallel dual_batch --schedule multistep", "--data x: no such file or folder on this machine"),
    ],
)
def test_an_option_error_is_printed_once_a_machine_and_recorded_by_every_rank(
    *,
    options: str,
    says: str,
    local_rank: str,
    data: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before they join, which would fail here."""
    given = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
    for name, value in (given | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert main(options.format(data=data).split()) == 2
    shown, line = capfd.readouterr().err, f"train: error: {says}"
    assert shown.startswith(line) and shown.count("\n") == 1 if local_rank == "0" else not shown
    recorded = json.loads((tmp_path / "error.json").read_text())["message"]
    assert recorded["message"] == recorded["extraInfo"]["py_callstack"]
    assert recorded["message"].startswith(line)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_checkpoint(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "o").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "launcher-test", tmp_path / "o"], check=True)
    try:
        assert main(["--data", str(data), "--output", str(tmp_path / "o"), *QUICK, "--arch", "cifar_resnet20"]) == 2
        assert [path.name for path in (tmp_path / "o" / "checkpoints").iterdir()] == []
    finally:
        subprocess.run(["umount", "--lazy", tmp_path / "o"], check=True)  # metrics.jsonl is open until exit
    (error,) = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"train: error: .*/o/checkpoints/last.pt.tmp could not be written: No space left on .*", error)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_disk_that_tensorboards_thread_finds_full_is_one_line(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "0" / "tensorboard"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "launcher-test", folder], check=True)
    try:
        (rank,) = start(tmp_path, 1, "--data", data, *QUICK, "--log-every", "1")
        assert finish([rank]) == [2]
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
    assert rank.lines[-1] == f"train: error: a file in {tmp_path}/0 could not be written: No space left on device"
    assert "Traceback" not in rank.text


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_while_a_checkpoint_is_written_is_one_line(
    number: int, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS and a broken disk say it: what was written before is lost."""

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    assert main(["--data", str(data), "--output", str(tmp_path / "o"), *QUICK]) == 2
    (error,) = capfd.readouterr().err.splitlines()
    assert error.endswith(f"/o/checkpoints/last.pt.tmp could not be written: {os.strerror(number)}")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_the_best_checkpoint_takes_no_space_of_its_own(tmp_path: Path) -> None:
    """On a disk with room for two checkpoints: the last and the previous one, of which one is the best."""
    folder, state = tmp_path / "o", {"format": 1, "weights": torch.zeros(250_000)}
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2304k", "launcher-test", folder], check=True)
    try:
        saver = Saver(folder, keep=2)
        for epoch in (1, 2):
            saver.save(state | {"epoch": epoch}, best=True, epoch=epoch)
        saver.wait()
        saver.save(state | {"epoch": 3}, best=True, epoch=3)
        with pytest.raises(OSError, match="No space left on device"):
            saver.close()
        assert [read(folder / name)["epoch"] for name in ("last.pt", "best.pt", "previous.pt")] == [2, 2, 1]
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("name", ["last.pt", "previous.pt", "best.pt"])
def test_a_folder_named_like_a_checkpoint_is_refused_before_the_first_step(
    name: str, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither can be replaced by a file."""
    (tmp_path / "o" / "checkpoints" / name).mkdir(parents=True)
    assert main(["--data", str(data), "--output", str(tmp_path / "o"), *QUICK]) == 2
    (error,) = capfd.readouterr().err.splitlines()
    assert f"checkpoints/{name} is a folder, not a checkpoint; remove it" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(data), "--output", str(tmp_path / "o"), *QUICK, "--device", "cuda"]) == 2
    assert "torch found no GPU" in capfd.readouterr().err


def test_a_checkpoint_of_another_model_is_left_alone(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "output"
    common = ["--data", str(data), "--output", str(output), *QUICK]
    assert main(common) == 0
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    other = digit_tree(tmp_path / "other", 5, 5)
    for options, says in (
        (["--arch", "cifar_resnet20"], "has arch smallcnn, this run cifar_resnet20"),
        (["--data", str(other), "--batch-size", "4"], "has classes (10)"),
        (["--resume", "none"], "would be overwritten"),
        (["--optimizer", "adamw"], "saved with --optimizer sgd, not adamw"),
        (["--decay", "all"], "saved with --decay weights, not all"),
        (["--amp", "O2"], "saved without --amp O2"),
        (["--ema-decay", "0.9"], "saved without --ema-decay"),
    ):
        assert main([*common, *options]) == 2
        assert says in capfd.readouterr().err
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_a_dual_batch_run_is_left_alone(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saver = Saver(tmp_path / "o" / "checkpoints", keep=0)
    saver.save({"format": 1, "arch": "smallcnn", "dual_batch": {"finished": 3}})
    saver.close()
    assert main(["--data", str(data), "--output", str(tmp_path / "o"), *QUICK]) == 2
    assert "is from a dual-batch run" in capfd.readouterr().err


def test_a_checkpoint_of_another_program_is_refused(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", str(data), "--output", str(tmp_path / "o"), *QUICK, "--resume", str(tmp_path / "mine.pt")]
    for content in (b"PK something", b""):
        (tmp_path / "mine.pt").write_bytes(content)
        assert main(arguments) == 2
        assert "mine.pt: damaged" in capfd.readouterr().err


def test_data_missing_on_one_rank_ends_both_and_names_the_rank(data: Path, tmp_path: Path) -> None:
    """The rank that has its data must not wait for the other one forever."""
    (tmp_path / "0").symlink_to(data)
    ranks = start(tmp_path / "out", 2, tmp_path, *QUICK, program=BY_RANK)
    assert finish(ranks) == [2, 2]
    assert ranks[0].text.count("error") == 0
    assert "no such file or folder" in ranks[1].text
    assert "(rank 1 on " in ranks[1].text
    # destroying it would wait for collectives that a failed peer never joins
    assert [rank.lines[-1] for rank in ranks] == ["process group kept"] * 2


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:300])


def test_damaged_images_are_reported_once_skipped_and_not_counted(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = sorted((data / "train" / "3").iterdir())[0], sorted((data / "val" / "3").iterdir())[0]
    truncated(bad[0])
    bad[1].write_bytes(bytes(3000))
    output = tmp_path / "output"
    assert main(["--data", str(data), "--output", str(output), *QUICK, "--epochs", "2"]) == 0
    printed = capfd.readouterr().out
    for path in bad:
        assert printed.count(f"skipped {path}") == 1
    assert "(11 images" in printed
    assert printed.count("; 2 unreadable images skipped") == 2  # in each epoch's line, of training and validation
    assert main(["--data", str(data), "--output", str(tmp_path / "strict"), *QUICK, "--max-damaged", "0"]) == 2
    assert "increase --max-damaged" in capfd.readouterr().err


def test_a_pipe_named_like_an_image_is_skipped(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Opening a pipe waits for a writer."""
    for split in ("train", "val"):
        os.mkfifo(data / split / "0" / "pipe.jpg")
    assert main(["--data", str(data), "--output", str(tmp_path / "o"), *QUICK]) == 0
    assert capfd.readouterr().out.count("pipe.jpg: not a regular file") == 2
    os.mkfifo(tmp_path / "weights.pth")
    common = ["--data", str(data), "--output", str(tmp_path / "p"), *QUICK]
    for option in ("--pretrained", "--resume"):
        assert main([*common, option, str(tmp_path / "weights.pth")]) == 2
        assert "weights.pth: cannot be read: not a regular file" in capfd.readouterr().err


def test_a_read_that_never_returns_does_not_outlive_sigterm(data: Path, tmp_path: Path) -> None:
    """The reading rank reports the file; the other rank waits for it in a collective."""
    for rank in ("0", "1"):
        (tmp_path / rank).symlink_to(data)
    ranks = start(tmp_path / "out", 2, tmp_path, *QUICK, program=BY_RANK, env={"STUCK": "0"})
    ranks[0].wait_for("stuck")
    for rank in ranks:
        rank.process.send_signal(signal.SIGTERM)
    codes = finish(ranks)
    assert codes[0] == 143, ranks[0].text
    assert codes[1] in (143, 2), ranks[1].text  # 2: it has lost the other one
    assert re.search(r"after SIGTERM; .*/train/\d/\w+.jpg", ranks[0].text), ranks[0].text


def test_a_training_that_diverges_fails_and_reports_the_step(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = ["--data", str(data), *QUICK, "--lr", "1e20", "--epochs", "2"]
    assert main([*common, "--output", str(tmp_path / "o")]) == 2
    (error,) = capfd.readouterr().err.splitlines()
    assert "the loss is nan at epoch 1, step 3: training diverged; try a lower --lr" in error
    assert not list((tmp_path / "o" / "checkpoints").glob("*"))
    assert '"error": "the loss is nan' in (tmp_path / "o" / "metrics.jsonl").read_text()
    assert main([*common, "--output", str(tmp_path / "on"), "--allow-nan"]) == 0


def test_path_traversal_in_an_archive_has_no_effect(tmp_path: Path) -> None:
    """Paths that would leave the folder, and links, are not images of the data set."""
    path = tmp_path / "data.tar"
    with tarfile.open(DIGITS) as source, tarfile.open(path, "w") as tar:
        for member in source.getmembers()[::40]:
            tar.addfile(member, source.extractfile(member))
        for name, kind in (("../train/evil/a.jpg", tarfile.REGTYPE), ("train/0/link.jpg", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info, io.BytesIO())
    assert main(["--data", str(path), "--output", str(tmp_path / "o"), *QUICK]) == 0
    assert {entry.name for entry in tmp_path.iterdir()} == {"data.tar", "o"}


def odd(mode: str) -> Image.Image:
    image = Image.linear_gradient("L").resize((40, 30))
    return image.convert("RGB").convert("CMYK") if mode == "CMYK" else image.convert(mode)


def test_unusual_image_files_can_be_trained_on(data: Path, tmp_path: Path) -> None:
    for mode in ("L", "CMYK"):
        odd(mode).save(data / "train" / "1" / f"{mode}.jpg")
    for mode in ("P", "RGBA", "LA", "1", "I;16"):
        odd("I").convert("I;16").save(data / "train" / "1" / "deep.png")
        if mode != "I;16":
            odd(mode).save(data / "train" / "1" / f"{mode}.png")
    assert main(["--data", str(data), "--output", str(tmp_path / "o"), *QUICK, "--max-damaged", "0"]) == 0
