# Must run under Python 3.6. Any exception of an import is a result.
# ruff: noqa: UP031
"""Run in a built image: import each of the packages that were added, once, and let pip check all requirements.

    python3 -c "$(cat packages.py)" NAME REQUIREMENT...    NAME: under which this interpreter was started

A package that was compiled for another torch installs without a word and fails here. Every import is a process of its
own, because it may crash. The result is one line with MARK and a JSON object: imports (error by package, "" if it
works), unknown (requirements of which no module to import is known), conflicts (lines of `pip check`).
"""

import json
import re
import subprocess
import sys

MARK = "LAUNCHER-PROBE "
LIMIT = 120  # seconds of an import from a cold disk
NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?=$|[\[=<>!~;@\s#])")
NOT_ITS_OWN = ("test", "tests", "docs", "examples", "benchmarks", "benchmark", "scripts", "tools", "build")
IMPORT = "import importlib, sys; importlib.import_module(sys.argv[1])"


def modules(package):
    """Return the names that a package installs at the top of the import path, as far as they are known."""
    try:
        from importlib.metadata import PackageNotFoundError, distribution
    except ImportError:  # before Python 3.8
        return []
    try:
        files = distribution(package).files or ()
    except PackageNotFoundError:
        return []
    found = set()
    for path in files:
        parts = str(path).split("/")
        name = parts[0].split(".")[0]
        whole = len(parts) == 2 and parts[1].startswith("__init__.")
        alone = len(parts) == 1 and parts[0].endswith((".py", ".so"))
        if (whole or alone) and name.isidentifier() and not name.startswith("_") and name not in NOT_ITS_OWN:
            found.add(name)
    return sorted(found)


def output(argv):
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.run(argv, check=False, stdin=nothing, stdout=pipe, stderr=pipe, timeout=LIMIT)


def error_of(module):
    """Import it in another process; return the last line of its error, "" if it works."""
    try:
        done = output([sys.executable, "-c", IMPORT, module])
    except subprocess.TimeoutExpired:
        return "import %s took more than %d s" % (module, LIMIT)
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return "import %s crashed with signal %d" % (module, -done.returncode)
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return "import %s: %s" % (module, lines[-1][:300] if lines else "exit code %d" % done.returncode)


def conflicts():
    """Return the unmet requirements of all packages, none if there is no pip."""
    try:
        done = output([sys.executable, "-m", "pip", "check", "--disable-pip-version-check"])
    except subprocess.TimeoutExpired:
        return []
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    return [line.strip() for line in lines if "requires" in line or "not supported" in line]


def main():
    imports, unknown = {}, []
    for requirement in sys.argv[2:]:
        found = NAME.match(requirement)
        own = modules(found.group(1)) if found else []
        if not own:  # a URL, a package in a namespace (nvidia.dali), one without a list of its files
            unknown.append(requirement)
            continue
        errors = [error for error in map(error_of, own) if error]
        imports[found.group(1)] = errors[0] if errors else ""
    report = {"python": sys.argv[1], "imports": imports, "unknown": unknown, "conflicts": conflicts()}
    sys.stdout.write("\n" + MARK + json.dumps(report) + "\n")
    sys.stdout.flush()


main()
