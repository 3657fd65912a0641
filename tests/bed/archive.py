"""The Debian archive that this machine's apt uses; no host name is hard-coded here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.bed.settings import BedUnavailable

APT = Path("/etc/apt")


@dataclass(frozen=True)
class Archive:
    """One apt source: its address, and the key file that signs it if it names one."""

    uri: str
    signed_by: str | None


def debian_archive(root: Path = APT) -> Archive:
    """The first binary source of `root` that serves component main of this machine's Debian release.

    Raises BedUnavailable if the machine does not run Debian or has no such source.
    """
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', Path("/etc/os-release").read_text(), re.MULTILINE))
    if release.get("ID") != "debian":
        raise BedUnavailable(
            f"no {release.get('ID')} package source has Debian's packages; the bed installs itself on Debian only"
        )
    suite = release["VERSION_CODENAME"]
    for source in _sources(root):
        if suite in source["suites"].split() and "main" in source["components"].split():
            return Archive(source["uris"].split()[0], source.get("signed-by"))
    raise BedUnavailable(f"{root} names no source for {suite} main")


def _sources(root: Path) -> list[dict[str, str]]:
    """Sources in both of apt's formats, as the fields of the newer format, in lower case."""
    found: list[dict[str, str]] = []
    for path in sorted((root / "sources.list.d").glob("*.sources")):
        for paragraph in re.split(r"\n\s*\n", path.read_text()):
            fields = dict(re.findall(r"^([\w-]+):\s*(.*)$", paragraph, re.MULTILINE))
            lower = {key.lower(): value for key, value in fields.items()}
            if "deb" in lower.get("types", "").split() and lower.get("enabled", "yes") != "no":
                found.append({"suites": "", "components": "", **lower})
    for path in [root / "sources.list", *sorted((root / "sources.list.d").glob("*.list"))]:
        if not path.exists():
            continue
        for line in path.read_text().splitlines():
            if match := re.match(r"deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+(.*)", line):
                options, uri, suite, components = match.groups()
                signed = re.search(r"signed-by=(\S+)", options or "")
                source = {"uris": uri, "suites": suite, "components": components}
                found.append({**source, "signed-by": signed[1]} if signed else source)
    return found
