"""python -c "$(cat flight_report.py)" ARCHIVE: report what the workers wait for, from flight recordings and stacks.

Runs in the job's image with the analyser of its torch (torch.distributed.flight_recorder since 2.9, before that the
package tools in torch's wheel). ARCHIVE is a tar of gloo/gloo_RANK, nccl/nccl_RANK and stack/stack_RANK; it is removed.
Prints one line with MARK and a JSON object:

    problems  the first mismatch of each process group: group, number, collective, sizes, ranks (that have a
              recording), missing (ranks that did not join), other (rank -> the collective that it called instead)
    waiting   if there are no problems: the last collective of each group, in the same format
    silent    ranks of the groups without a recording
    stands    rank -> its position in the job's own code, file:line in function
    error     why the analyser could not read the recordings, else ""
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
CODE = re.compile(r"^(/workspace/code|/.*/\.node/[^/]+/code)/")  # the job's code folder in both runtimes
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')

Entry = dict[str, Any]
Dumps = dict[str, dict[str, Any]]  # by file name, as returned by the analyser's read_dir()


def main() -> None:
    archive = Path(sys.argv[-1])
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as tar:
            tar.extractall(folder)  # noqa: S202 - created by the launcher
        archive.unlink()
        root = Path(folder)
        report: dict[str, Any] = {"problems": [], "waiting": [], "silent": [], "error": ""}
        report["stands"] = {path.name.rpartition("_")[2]: position(path.read_text()) for path in root.glob("stack/*")}
        for recorder in ("gloo", "nccl"):
            if (root / recorder).is_dir():
                try:
                    analyse(recorder, root / recorder, report)
                except Exception as error:  # noqa: BLE001 - it raises AssertionError on unknown input, and formats change
                    report["error"] = f"{type(error).__name__}: {error}"
        if report["problems"]:
            report["waiting"] = []
    sys.stdout.write(f"\n{MARK}{json.dumps(report)}\n")


def analyse(recorder: str, folder: Path, report: dict[str, Any]) -> None:
    """Add the results of a recorder to the report. The imported analyser also prints output."""
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
    """Convert the recordings to the format that the analyser expects; return the ranks without a recording."""
    present = {dump["rank"] for dump in dumps.values()}
    known = [ast.literal_eval(group["ranks"]) for dump in dumps.values() for group in dump["pg_config"].values()]
    if gloo:
        for dump in dumps.values():
            dump["entries"] = [_as_nccl(entry) for entry in dump["entries"] if not entry["is_p2p"]]
        groups = _groups(dumps, present)
    for dump in dumps.values():
        if gloo:
            dump["pg_config"] = {name: dict(group) for name, group in groups.items()}
        for group in dump["pg_config"].values():  # the analyser skips groups with missing ranks
            group["ranks"] = str([rank for rank in ast.literal_eval(str(group["ranks"])) if rank in present])
    begin: dict[str, int] = {}  # by group: the first collective that is in all buffers
    for dump in dumps.values():
        seen = set()
        for entry in dump["entries"]:
            name = entry["process_group"][0]
            if name not in seen and dump["entries"][0]["record_id"] > 0:
                begin[name] = max(begin.get(name, 0), entry["collective_seq_id"])
            seen.add(name)
    for dump in dumps.values():
        kept = [e for e in dump["entries"] if e["collective_seq_id"] >= begin.get(e["process_group"][0], 0)]
        # The analyser truncates all recordings at the same record id, but ranks of different groups count differently.
        dump["entries"] = [{**entry, "record_id": number} for number, entry in enumerate(kept)]
    return sorted({rank for ranks in known for rank in ranks} - present)


def _groups(dumps: Dumps, present: set[int]) -> dict[str, Entry]:
    """Return the groups with the ranks that called a collective of it: gloo does not record the ranks of a group."""
    groups: dict[str, Entry] = {}
    for dump in dumps.values():
        for name, desc in {entry["process_group"] for entry in dump["entries"]}:
            group = groups.setdefault(name, {"desc": desc, "ranks": []})
            group["ranks"] = sorted({*group["ranks"], dump["rank"]} if desc != "default_pg" else present)
    return groups


def _as_nccl(entry: Entry) -> Entry:
    """Convert an entry for older analysers, which support only NCCL and expect one output tensor for an all_gather."""
    name, pieces = entry["profiling_name"].replace("gloo:", "nccl:"), entry["output_sizes"]
    entry = {**entry, "profiling_name": name}
    if name == "nccl:all_gather" and pieces:
        return {**entry, "output_sizes": [[len(pieces), *pieces[0]]], "output_dtypes": entry["output_dtypes"][:1]}
    return entry


def first_problems(collectives: list[Any]) -> Iterator[Entry]:
    """Yield the first problem of each group: the analyser does not match collectives after it."""
    seen = set()
    for one in collectives:
        if one.group_id not in seen and (one.missing_ranks or one.mismatch_collectives):
            seen.add(one.group_id)
            other = {str(rank): _compared(called) for rank, called in (one.mismatch_collectives or {}).items()}
            yield {**_compared(one), "missing": sorted(one.missing_ranks or ()), "other": other}


def newest(dumps: Dumps) -> Iterator[Entry]:
    """Yield the last collective of each group with the ranks that called it."""
    last: dict[str, Entry] = {}  # by group
    for dump in dumps.values():
        for group, entry in {entry["process_group"][0]: entry for entry in dump["entries"]}.items():  # the rank's last
            known = last.get(group)
            if known is None or entry["collective_seq_id"] > known["collective_seq_id"]:
                last[group] = {**entry, "ranks": [dump["rank"]]}
            elif entry["collective_seq_id"] == known["collective_seq_id"]:
                known["ranks"].append(dump["rank"])
    for entry in last.values():
        group, number = entry["process_group"][1], entry["collective_seq_id"]
        yield _entry(group, number, entry["profiling_name"], entry["input_sizes"], entry["ranks"])


def _compared(one: Any) -> Entry:
    """Return the entry of a Collective of the analyser."""
    group = one.pg_desc.partition(":")[2]
    return _entry(group, one.collective_seq_id, one.collective_name, one.input_sizes, one.expected_ranks)


def _entry(group: str, number: int, name: str, sizes: list[list[int]], ranks: Iterable[int]) -> Entry:
    collective = name.partition(":")[2]
    return {"group": group, "number": number, "collective": collective, "sizes": sizes, "ranks": sorted(ranks)}


def position(stack: str) -> str:
    """Return the position of the main thread, printed last by faulthandler: its first frame outside of libraries."""
    lines = stack.rpartition("(most recent call first)")[2].splitlines()
    frames = [match.groups() for match in map(FRAME.match, lines) if match]
    own = [frame for frame in frames if not LIBRARY.search(frame[0])]
    return next((f"{CODE.sub('', file)}:{line} in {function}" for file, line, function in own or frames), "")


if __name__ == "__main__":
    main()
