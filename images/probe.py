# Must run under Python 3.6. No pathlib: it would take a third of the startup. Any exception of a check is a result.
# ruff: noqa: PTH112, PTH113, PTH118, PTH120, PTH123, PTH208, UP031, BLE001
"""Run in any image with Python 3.6 and torch 1.1 or later, and report the state of its torch and torchvision.

    python3 -c "$(cat probe.py)" NAME facts    facts for `launcher up`; does not import torch, less than 0.1 s
    python3 -c "$(cat probe.py)" NAME full     also import torch and torchvision, and test operations of both

NAME is the name under which this interpreter was started. The result is one line with MARK and a JSON object. Other
output comes from the image and is ignored.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import sys

MARK = "LAUNCHER-PROBE "
VERSION = re.compile(r"""^__version__(?:\s*:\s*\w+)?\s*=\s*['"]([^'"]+)['"]""", re.M)
CUDA = re.compile(r"""^cuda\s*(?::[^=\n]*)?=\s*['"]([\d.]+)['"]""", re.M)
ARGUMENTS = re.compile(r"""add_argument\(((?:\s*['"]-{1,2}[a-zA-Z][\w-]*['"]\s*,?)+)""")
LONG = re.compile(r"""['"]--([a-zA-Z][\w-]*)['"]""")
CODE = "/workspace/code"
DECODER = "/opt/launcher/decoder"  # see images/decoder.Dockerfile
SOURCE_TREES = ("/opt/pytorch/vision", "/opt/pytorch/pytorch/vision")


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def folder(package):
    """Return a package's folder without importing it; "" if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return ""
    if spec is None or not spec.origin:
        return ""
    return os.path.dirname(spec.origin)


def version(package_folder):
    found = VERSION.search(read(os.path.join(package_folder, "version.py"))) if package_folder else None
    if found is None and package_folder:
        found = VERSION.search(read(os.path.join(package_folder, "__init__.py")))  # torchvision before 0.2.2
    return found.group(1) if found else ""


def built_for(torch):
    """Return the CUDA version that torch was built for, "" for none."""
    found = CUDA.search(read(os.path.join(torch, "version.py"))) if torch else None
    return found.group(1) if found else ""


def options(source):
    """Return the long options in an argparse source, with underscores."""
    return sorted({name.replace("-", "_") for call in ARGUMENTS.findall(source) for name in LONG.findall(call)})


def own_files():
    """Return the names in the image's own folder at the path of the job's code, which will hide them."""
    try:
        return sorted(os.listdir(CODE))
    except OSError:
        return []


def facts(name):
    torch = folder("torch")
    vision = folder("torchvision")
    run = read(os.path.join(torch, "distributed", "run.py")) if torch else ""
    launch = read(os.path.join(torch, "distributed", "launch.py")) if torch else ""
    return {
        "python": name,
        "python_version": "%d.%d.%d" % sys.version_info[:3],
        "executable": sys.executable,
        "torch": version(torch),
        "torch_folder": torch,
        "cuda": built_for(torch),
        "torchvision": version(vision),
        "torchvision_folder": vision,
        "run": bool(run),
        "launch": bool(launch),
        "flags": options(run or launch),
        "code": own_files(),
        "decoder": decoder(),
    }


def decoder():
    """Return where the trainer's decoder comes from: "image", "compiler" with libjpeg-turbo's headers, or ""."""
    import subprocess  # only here: it takes a tenth of the startup

    if os.path.isdir(DECODER) and any(name.startswith("roi-") for name in os.listdir(DECODER)):
        return "image"
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if not compiler:
        return ""
    source, pipe = b"#include <stdio.h>\n#include <jpeglib.h>\n", subprocess.PIPE
    try:
        done = subprocess.run([compiler, "-E", "-"], check=False, input=source, stdout=pipe, stderr=pipe, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else "compiler"


def surroundings():
    """Return the tools for a repair: pip, its constraints, compilers, NVIDIA's source tree."""
    path = os.environ.get("PIP_CONSTRAINT", "")
    pins = {}
    for line in read(path).splitlines() if path else ():
        found = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:==|@)\s*(\S+)", line)
        if found:
            pins[re.sub(r"[-_.]+", "-", found.group(1)).lower()] = found.group(2)
    wanted = (
        "PYTORCH_VERSION",
        "PYTORCH_BUILD_VERSION",
        "NVIDIA_PYTORCH_VERSION",
        "CUDA_VERSION",
        "TORCH_CUDA_ARCH_LIST",
    )
    return {
        "pip": version(folder("pip")),
        "constraint_file": path,
        "constraint_exists": bool(path) and os.path.isfile(path),
        "constraint_pins": pins,
        "tools": [tool for tool in ("git", "g++", "nvcc", "ninja") if shutil.which(tool)],
        "source_tree": next((tree for tree in SOURCE_TREES if os.path.isfile(os.path.join(tree, "setup.py"))), ""),
        "environment": {key: os.environ[key] for key in wanted if key in os.environ},
    }


def message(error):
    """Return an error's text with its causes: torch's error lacks the reason why a library failed to load."""
    found = []
    while error is not None and len(found) < 5:
        found.append("%s: %s" % (type(error).__name__, str(error).strip()))
        error = error.__cause__ or error.__context__
    return " <- ".join(found)


def check(report, name, action):
    """Run `action` and report its result immediately: {"ok": True, ...} or {"ok": False, "error": ...}."""
    report({"trying": name})
    try:
        result = dict(action() or {}, ok=True)
    except BaseException as error:  # a SystemExit raised by the image's packages is also a result
        result = {"ok": False, "error": message(error)}
    report({name: result})
    return result["ok"]


def import_torch():
    import torch

    cuda = torch.cuda.is_available()
    return {
        "version": str(torch.__version__),
        "git": str(getattr(torch.version, "git_version", "") or ""),
        "cuda": torch.version.cuda or "",
        "cuda_available": cuda,
    }


def import_torchvision():
    import torchvision

    return {"version": str(torchvision.__version__)}


def library():
    """Load torchvision's compiled operators directly, because its import hides the error."""
    import torch

    path = folder("torchvision")
    found = [name for name in sorted(os.listdir(path)) if name.startswith("_C") and name.endswith(".so")]
    for name in found:
        torch.ops.load_library(os.path.join(path, name))
    return {"libraries": found}


def nms(device):
    def run():
        import torch
        from torchvision.ops import nms as kept

        boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [1.0, 1.0, 10.0, 10.0], [20.0, 20.0, 30.0, 30.0]], device=device)
        result = kept(boxes, torch.tensor([0.9, 0.8, 0.7], device=device), 0.5).cpu().tolist()
        if result != [0, 2]:
            raise RuntimeError("nms kept %r of three boxes, not [0, 2]" % (result,))

    return run


def vgg16():
    """Run a model that supports only 224x224 images in torchvision before 0.2.2 (pytorch/vision PR 747)."""
    import torch
    import torchvision

    model = torchvision.models.vgg16(num_classes=10, init_weights=False).eval()
    with torch.no_grad():
        shape = tuple(model(torch.zeros(1, 3, 32, 32)).shape)
    if shape != (1, 10):
        raise RuntimeError("vgg16 returned shape %r, not (1, 10)" % (shape,))


def checks(report):
    if not check(report, "import_torch", import_torch):
        return
    if not check(report, "import_torchvision", import_torchvision):
        if folder("torchvision"):
            check(report, "library", library)
        return
    import torch

    if importlib.util.find_spec("torchvision.ops") is None:
        report({"nms": {"ok": True, "absent": True}})  # torchvision before 0.3 has no operators
    else:
        check(report, "nms", nms("cpu"))
        if torch.cuda.is_available():
            check(report, "nms_gpu", nms("cuda"))
    check(report, "vgg16", vgg16)


def checks_in_child():
    """Run the checks in a child process: a library built for another torch may crash."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as stream:

            def report(piece):
                stream.write(json.dumps(piece) + "\n")
                stream.flush()

            checks(report)
        os._exit(0)
    os.close(writer)
    found, trying = {}, ""
    with os.fdopen(reader) as stream:
        for line in stream:
            piece = json.loads(line)
            trying = piece.pop("trying", trying)
            found.update(piece)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and trying not in found:
        number = os.WTERMSIG(status)
        found[trying] = {"ok": False, "error": "crashed with signal %d (%s)" % (number, signal.Signals(number).name)}
    return found


def main():
    name = sys.argv[1] if len(sys.argv) > 1 else sys.executable
    report = facts(name)
    if len(sys.argv) > 2 and sys.argv[2] == "full":
        # the checks first: with Python before 3.12, an older setuptools cannot be imported (torch 2.4 does so) once it
        # was asked where pip is
        report["checks"] = checks_in_child()
        report.update(surroundings())
    sys.stdout.write("\n" + MARK + json.dumps(report) + "\n")
    sys.stdout.flush()


main()
