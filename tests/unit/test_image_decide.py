"""The decision about torchvision, given the probe's result and the job's request."""

import pytest

from launcher.errors import ImageUnfit
from launcher.image.faults import Report, decide, find_faults, find_notes

SHAPES = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x512 and 25088x4096)"
NO_NMS = "RuntimeError: operator torchvision::nms does not exist"
NO_CUDA = "OSError: libtorch_cuda.so: cannot open shared object file: No such file or directory"
NO_CUDART = (
    "OSError: Could not load this library: /x/torchvision/_C.so "
    "<- OSError: libcudart.so.13: cannot open shared object file: No such file or directory"
)
OK = {"ok": True}


def bad(error):
    return {"ok": False, "error": error}


def report(
    torch="2.14.1+cu130", torchvision="0.29.1+cu130", cuda="13.0", tools=("g++", "git", "nvcc"), tree="", **checks
):
    """The result of a full probe of an image with these versions; checks that are not given passed."""
    found = {"import_torch": {"ok": True, "cuda": cuda}, "import_torchvision": OK, "nms": OK, "vgg16": OK} | checks
    return Report.from_json(
        {
            "python": "python3",
            "python_version": "3.12.3",
            "torch": torch,
            "torch_folder": "/site/torch" if torch else "",
            "torchvision": torchvision,
            "torchvision_folder": "/site/torchvision" if torchvision else "",
            "pip": "24.0",
            "tools": tools,
            "source_tree": tree,
            "checks": found,
        }
    )


def test_a_working_base_is_kept():
    assert decide("auto", report(), "x").step == "keep"


def test_a_minor_difference_alone_is_a_note_not_a_fault():
    nvidia = report("2.8.0a0+5228986c39.nv25.06", "0.22.0a0+95f10a4e")
    decision = decide("auto", nvidia, "x")
    assert decision.step == "keep"
    assert "0.23.0" in decision.notes[0]
    assert find_faults(nvidia) == []


def test_vgg_without_adaptive_pool_is_named_and_repaired_with_the_pair_of_this_torch():
    old = report(torchvision="0.2.1", nms={"ok": True, "absent": True}, vgg16=bad(SHAPES))
    [fault] = find_faults(old)
    assert str(fault) == "VGG without adaptive pool: torchvision 0.2.1 < 0.2.2 supports 224x224 images only"
    assert fault.error == SHAPES
    assert decide("auto", old, "x").step == "wheel 0.29.1 cu130"


def test_the_original_nvidia_image_gets_the_pure_python_release():
    original = report(
        "1.1.0a0+0885dd28", "0.2.1", "10.1", nms={"ok": True, "absent": True},
        vgg16=bad("RuntimeError: size mismatch, m1: [1 x 512], m2: [25088 x 4096]"),
    )  # fmt: skip
    decision = decide("auto", original, "x")
    assert decision.step == "wheel 0.2.2.post3"
    assert "no operators" in decision.notes[0]


@pytest.mark.parametrize("library", [NO_CUDA, NO_CUDART])
def test_cpu_torch_with_a_cuda_wheel_is_named_and_gets_the_cpu_wheel(library):
    mixed = report("2.13.0+cpu", "0.28.0", cuda="", import_torchvision=bad(NO_NMS), library=bad(library))
    [fault] = find_faults(mixed)
    assert "operator torchvision::nms does not exist" in str(fault)
    assert "torch 2.13.0+cpu is built for CPU, but torchvision 0.28.0 for CUDA" in str(fault)
    assert decide("auto", mixed, "x").step == "wheel 0.28.0 cpu"


def test_a_cpu_torch_without_a_local_version_gets_the_cpu_wheel_too():
    mixed = report("2.13.0", "0.28.0", cuda="", import_torchvision=bad(NO_NMS), library=bad(NO_CUDA))
    assert decide("auto", mixed, "x").step == "wheel 0.28.0 cpu"


def test_torchvision_newer_than_torch():
    symbol = "ImportError: /x/_C.so: undefined symbol: _ZN3c106detail14torchCheckFail"
    newer = report("2.6.0+cu124", "0.29.1", "12.4", import_torchvision=bad(NO_NMS), library=bad(symbol))
    [fault] = find_faults(newer)
    assert "0.29.1 was built for another torch; torch 2.6.0+cu124 needs torchvision 0.21.0" in str(fault)
    assert symbol in fault.error
    assert decide("auto", newer, "x").step == "wheel 0.21.0 cu124"


def test_another_cuda_runtime_is_named():
    runtime = "ImportError: libcudart.so.9.0: cannot open shared object file: No such file or directory"
    [fault] = find_faults(report("1.1.0a0+0885dd28", "0.3.0", "10.1", import_torchvision=bad(runtime)))
    assert "built for another CUDA: libcudart.so.9.0 is missing" in str(fault)


def test_no_torchvision_at_all():
    assert decide("auto", report(torchvision=""), "x").step == "wheel 0.29.1 cu130"


def test_a_missing_requirement_is_named():
    [fault] = find_faults(
        report(torchvision="0.2.1", import_torchvision=bad("ModuleNotFoundError: No module named 'six'"))
    )
    assert str(fault) == "torchvision 0.2.1 cannot be imported: its requirement six is not installed"


@pytest.mark.parametrize(
    ("tree", "torchvision", "step"),
    [("", "0.20.0a0", "source 0.21.0"), ("/opt/pytorch/vision", "", "source 0.21.0 /opt/pytorch/vision")],
)
def test_nvidias_torch_means_a_build_from_source(tree, torchvision, step):
    nvidia = report("2.6.0a0+ecf3bae40a.nv25.01", torchvision, tree=tree, import_torchvision=bad(NO_NMS))
    assert decide("auto", nvidia, "x").step == step


def test_a_requested_version_is_cloned_even_if_the_image_has_a_source_tree():
    nvidia = report("2.6.0a0+ecf3bae40a.nv25.01", "0.21.0a0", tree="/opt/pytorch/vision")
    assert decide("0.20.1", nvidia, "x").step == "source 0.20.1"


def test_a_source_build_without_nvcc_gets_a_note():
    nvidia = report("2.6.0a0+ecf3bae40a.nv25.01", "", tools=("g++", "git"))
    assert "no nvcc" in decide("auto", nvidia, "x").notes[0]


@pytest.mark.parametrize(("asked", "step"), [("0.29.1", "keep"), ("0.29.0", "wheel 0.29.0 cu130")])
def test_an_exact_version(asked, step):
    assert decide(asked, report(), "x").step == step


def test_keep_checks_nothing():
    assert decide("keep", Report.from_json({"python": ""}), "x").step == "keep"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (Report.from_json({"python": ""}), "the image has no Python"),
        (report(torch="", torchvision=""), "the image has no torch"),
        (
            report(import_torch=bad("ImportError: libcudart.so.13: cannot open")),
            "torch 2.14.1+cu130 cannot be imported",
        ),
        (report("2.6.0a0+ecf3bae40a.nv25.01", "", tools=("git",)), "the image lacks g++"),
        (report("3.7.0a0+123", "", cuda=""), "no matching torchvision is known for torch 3.7.0a0+123"),
    ],
)
def test_an_unrepairable_fault_is_refused_with_its_name(found, message):
    with pytest.raises(ImageUnfit, match="image x: ") as refusal:
        decide("auto", found, "x")
    assert message in str(refusal.value)
    assert refusal.value.next_step
    assert refusal.value.exit_code == 4


def test_a_missing_pip_is_refused_only_if_something_must_be_installed():
    without = Report.from_json(
        {"python": "python3", "torch": "2.14.1", "torch_folder": "/t", "checks": {"import_torch": OK}}
    )
    with pytest.raises(ImageUnfit, match="no pip"):
        decide("auto", without, "x")


def test_torch_from_a_mount_is_left_alone():
    assert decide("auto", report(torch="", torchvision=""), "x", mounted=True).step == "keep"


def test_a_torchvision_without_operators_is_a_note():
    pure = report("1.1.0a0+0885dd28", "0.2.2.post3", "10.1", nms={"ok": True, "absent": True})
    assert any("no operators" in note for note in find_notes(pure))
