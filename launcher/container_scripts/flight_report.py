"""python -c "$(cat flight_report.py)" ARCHIVE: what the workers wait for, by their flight recordings and stacks.

In the job's image, with the analyser of its torch (torch.distributed.flight_recorder since 2.9, before that the package
tools of torch's wheel). ARCHIVE is a tar of gloo/gloo_RANK, nccl/nccl_RANK and stack/stack_RANK; it is removed. Prints
one line: MARK and a JSON object:

    problems  the first of each process group that does not fit: group, number, collective, sizes, ranks (that have a
              recording), missing (ranks that did not come), other (rank -> the collective that it came to instead)
    waiting   where no problem was found: the last collective of each group, as above
    silent    ranks of the groups that left no recording
    stands    rank -> where it stands in the job's own code, file:line in function
    error     why the analyser could not read them, else ""
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MARK = "LAUNCHER-PROBE "
LIBRARY = re.compile(r"(^|/)(site-packages|dist-packages|lib/python3(\.\d+)?|torch|torch_plugin)/|^<|\?\?")
CODE = re.compile(r"^(/workspace/code|/.*/\.node/[^/]+/code)/")  # the job's code folder, as the two runtimes have it
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')

Entry = dict[str, Any]
Dumps = dict[str, dict[str, Any]]  # by file name, as the analyser's read_dir() returns them


def main() -> None:
    archive = Path(sys.argv[-1])
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder)  # noqa: S202 - the launcher has made it
        archive.unlink()
        root = Path(folder)
        report: dict[str, Any] = {"problems": [], "waiting": [], "silent": [], "error": ""}
        report["stands"] = {path.name.rpartition("_")[2]: stands(path.read_text()) for path in root.glob("stack/*")}
        for recorder in ("gloo", "nccl"):
            if (root / recorder).is_dir():
                try:
                    analyse(recorder, root / recorder, report)
                except Exception as error:  # noqa: BLE001 - it asserts what it does not know, and formats change
                    report["error"] = f"{type(error).__name__}: {error}"
        if report["problems"]:
            report["waiting"] = []
    sys.stdout.write(f"\n{MARK}{json.dumps(report)}\n")


def analyse(recorder: str, folder: Path, report: dict[str, Any]) -> None:
    """Fill in the report. Imports the analyser; it prints, too."""
    own = "torch.distributed.flight_recorder"
    package = own if importlib.util.find_spec(own) is not None else "tools.flight_recorder"
    builder, loader, config = (
        importlib.import_module(f"{package}.components.{name}") for name in ("builder", "loader", "config_manager")
    )
    arguments = config.JobConfig().parse_args([str(folder), "--prefix", f"{recorder}_", "--allow-incomplete-ranks"])
    dumps, version = loader.read_dir(arguments)
    report["silent"] = sorted({*report["silent"], *prepare(dumps, gloo=recorder == "gloo")})
    report["waiting"] += newest(dumps)
    report["problems"] += first_problems(builder.build_db(dumps, arguments, version).collectives)


def prepare(dumps: Dumps, *, gloo: bool) -> list[int]:
    """Bring the recordings into the form that the analyser expects; the ranks that left none."""
    present = {dump["rank"] for dump in dumps.values()}
    known = [ast.literal_eval(group["ranks"]) for dump in dumps.values() for group in dump["pg_config"].values()]
    if gloo:
        for dump in dumps.values():
            dump["entries"] = [_as_nccl(entry) for entry in dump["entries"] if not entry["is_p2p"]]
        groups = _groups(dumps, present)
    for dump in dumps.values():
        if gloo:
            dump["pg_config"] = {name: dict(group) for name, group in groups.items()}
        for group in dump["pg_config"].values():  # of a group whose ranks are not all here it compares none
            group["ranks"] = str([rank for rank in ast.literal_eval(str(group["ranks"])) if rank in present])
    begin: dict[str, int] = {}  # by group: the first collective that no full buffer has dropped
    for dump in dumps.values():
        seen = set()
        for entry in dump["entries"]:
            name = entry["process_group"][0]
            if name not in seen and dump["entries"][0]["record_id"] > 0:
                begin[name] = max(begin.get(name, 0), entry["collective_seq_id"])
            seen.add(name)
    for dump in dumps.values():
        kept = [e for e in dump["entries"] if e["collective_seq_id"] >= begin.get(e["process_group"][0], 0)]
        # It cuts all recordings off at the same record, but ranks of different groups count differently.
        dump["entries"] = [{**entry, "record_id": number} for number, entry in enumerate(kept)]
    return sorted({rank for ranks in known for rank in ranks} - present)


def _groups(dumps: Dumps, present: set[int]) -> dict[str, Entry]:
    """gloo does not record a group's ranks under its name: those that have come to a collective of it."""
    groups: dict[str, Entry] = {}
    for dump in dumps.values():
        for name, desc in {entry["process_group"] for entry in dump["entries"]}:
            group = groups.setdefault(name, {"desc": desc, "ranks": []})
            group["ranks"] = sorted({*group["ranks"], dump["rank"]} if desc != "default_pg" else present)
    return groups


def _as_nccl(entry: Entry) -> Entry:
    """An older analyser knows NCCL only. gloo records the pieces of an all_gather, NCCL the whole, which it checks."""
    name, pieces = entry["profiling_name"].replace("gloo:", "nccl:"), entry["output_sizes"]
    entry = {**entry, "profiling_name": name}
    if name == "nccl:all_gather" and pieces:
        return {**entry, "output_sizes": [[len(pieces), *pieces[0]]], "output_dtypes": entry["output_dtypes"][:1]}
    return entry


def first_problems(collectives: list[Any]) -> Iterator[Entry]:
    """After the first problem of a group the analyser pairs nothing any more."""
    seen = set()
    for one in collectives:
        if one.group_id not in seen and (one.missing_ranks or one.mismatch_collectives):
            seen.add(one.group_id)
            other = {str(rank): _compared(came_to) for rank, came_to in (one.mismatch_collectives or {}).items()}
            yield {**_compared(one), "missing": sorted(one.missing_ranks or ()), "other": other}


def newest(dumps: Dumps) -> Iterator[Entry]:
    """The last collective of each group, and the ranks that have come to it."""
    last: dict[str, Entry] = {}  # by group
    for dump in dumps.values():
        for group, entry in {entry["process_group"][0]: entry for entry in dump["entries"]}.items():  # the rank's own
            known = last.get(group)
            if known is None or entry["collective_seq_id"] > known["collective_seq_id"]:
                last[group] = {**entry, "ranks": [dump["rank"]]}
            elif entry["collective_seq_id"] == known["collective_seq_id"]:
                known["ranks"].append(dump["rank"])
    for entry in last.values():
        group, number = entry["process_group"][1], entry["collective_seq_id"]
        yield _told(group, number, entry["profiling_name"], entry["input_sizes"], entry["ranks"])


def _compared(one: Any) -> Entry:
    """one: a Collective of the analyser's."""
    group = one.pg_desc.partition(":")[2]
    return _told(group, one.collective_seq_id, one.collective_name, one.input_sizes, one.expected_ranks)


def _told(group: str, number: int, name: str, sizes: list[list[int]], ranks: Iterable[int]) -> Entry:
    collective = name.partition(":")[2]
    return {"group": group, "number": number, "collective": collective, "sizes": sizes, "ranks": sorted(ranks)}


def stands(stack: str) -> str:
    """Where the main thread, which faulthandler prints last, is: its first frame in no library, else the first."""
    lines = stack.rpartition("(most recent call first)")[2].splitlines()
    frames = [match.groups() for match in map(FRAME.match, lines) if match]
    own = [frame for frame in frames if not LIBRARY.search(frame[0])]
    return next((f"{CODE.sub('', file)}:{line} in {function}" for file, line, function in own or frames), "")


if __name__ == "__main__":
    main()
