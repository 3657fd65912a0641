"""What is said of each kind of end, to the letter: which node and rank, the exit code, the reason, the fix.

After an intended change: UPDATE_GOLDEN=1 python -m pytest tests/unit/test_explain.py, then read the diff.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from launcher.container_scripts.words import TRACEBACK
from launcher.faults.table import IMAGE
from launcher.records.store import NodeOfRun
from launcher.run.end.evidence import Evidence, WorkerError
from launcher.run.watch.attempts import AtBreakpoint, Attempt, EndedGeneration
from tests.failures import first_failure
from tests.unit.test_diagnose import LINGERS, OWN, REPORT, STACK, TOLD, VICTIM, WAITED, evidence, state
from tests.unit.test_faults import ENDS, NCCL, RAISED, read

GOLDEN = Path(__file__).parent / "golden" / "failures.json"
KNOWN = {"port": "29500", "place": IMAGE, "output": "/output"}
WAITS = STACK.replace("/workspace/code/train.py", "/x/site-packages/torch/distributed/distributed_c10d.py", 1)
STOPPED = f"{TRACEBACK}\ntorch.distributed.elastic.multiprocessing.api.SignalException: Process 27 got signal: 15\n"
OUT_OF_MEMORY = f"{RAISED}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
FIRST = Attempt(1.0)


def with_(one: Evidence, **changes: object) -> Evidence:
    return dataclasses.replace(one, **changes)  # type: ignore[arg-type]


def unstarted(rank: int, error: str, code: int | None = 127) -> Evidence:
    """As an engine reports a container that it could not start."""
    return with_(evidence(rank, ""), state=dataclasses.replace(state(code, error=error), started=0.0))


def on_one_node(logs: dict[int, str], attempt: Attempt = FIRST, log: str = "", code: int = 1) -> Evidence:
    return Evidence(NodeOfRun("n0", "n0", 0, "c", "/o", range(len(logs))), state(code), log, None, logs, (attempt,))


SUSPENDED = with_(evidence(1, STACK, 137), attempts=(Attempt(1, halted=frozenset({1})),))
AT_BREAKPOINT = with_(evidence(1, STACK, 143), at_breakpoint=(AtBreakpoint(1, 77, 5, "train.py:13, breakpoint()"),))
TIME_LIMIT = "step 3\nlauncher: time limit of 5 s reached\n"
HUNG = "launcher: no output and no step for 60 s\n"
CASES: dict[str, list[Evidence]] = {
    "suspended, and others waited": [evidence(0, VICTIM), SUSPENDED],
    "suspended, and others hung": [evidence(0, STACK, 125), SUSPENDED],
    "hung": [evidence(0, STACK, 125), evidence(1, VICTIM)],
    "hung, before an error": [evidence(0, STACK, 125, finished=9.0), evidence(1, OWN, finished=8.0)],
    "hung, without stacks": [evidence(0, HUNG, 125)],
    "hung, a command of the user's own": [with_(evidence(0, STACK, 125), log=HUNG + STACK, rank_logs={})],
    "hung, one rank waits for another": [evidence(0, WAITS, 125), evidence(1, STACK, 143)],
    "hung, all are importing": [evidence(0, STACK.replace("/workspace/code/", "<frozen importlib._bootstrap>"), 125)],
    "hung, at a breakpoint": [evidence(0, WAITS, 125), AT_BREAKPOINT],
    "hung, while all others had exited": [evidence(0, STACK, 125), WAITED],
    "hung, while others of its node had exited": [
        with_(evidence(0, LINGERS, 125), node=NodeOfRun("n0", "n0", 0, "c", "/o", range(4)), rank_logs={2: STACK})
    ],
    "out of memory": [evidence(0, OWN, finished=1.0), evidence(1, "step 3\n", 137, oom=True)],
    "out of memory, with an error": [evidence(0, OWN, 137, oom=True), evidence(1, VICTIM)],
    "time limit": [evidence(0, TIME_LIMIT, 124), evidence(1, VICTIM, finished=1.0)],
    "out of memory after a time limit": [evidence(0, "", 137, oom=True), evidence(1, TIME_LIMIT, 124, finished=9.0)],
    "exit code of the time limit": [evidence(0, "my deadline passed\n", 124)],
    "exit code of a hang": [evidence(0, "my deadline passed\n", 125)],
    "not started": [unstarted(0, "no such device"), evidence(1, VICTIM)],
    "not started, a known reason": [
        unstarted(0, 'OCI runtime create failed: runc create failed: exec: "./x.sh": permission denied: unknown')
    ],
    "not started, without an exit code": [unstarted(0, "no such device", None), evidence(1, OWN)],
    "own error before a node without a start": [unstarted(0, "", 137), evidence(1, OWN)],
    "own error": [evidence(0, VICTIM, finished=9.0), evidence(1, OWN, finished=11.0)],
    "own error, the first of two": [evidence(0, OWN, finished=9.0), evidence(1, TOLD, 2, finished=8.0)],
    "own error, its clock is wrong": [with_(evidence(0, OWN, finished=99.0), ahead=90.5), evidence(1, TOLD, 2)],
    "own error, a known cause": [evidence(0, OUT_OF_MEMORY), evidence(1, VICTIM)],
    "own error, not restarted": [with_(evidence(0, OWN), give_up_reason="`restarts` is not used: no step")],
    "own error, of torchrun's file": [with_(evidence(0, ""), error=WorkerError(OWN, 5.0)), evidence(1, VICTIM)],
    "own error, of another rank than torchrun saw": [
        on_one_node({0: VICTIM, 1: OWN}, Attempt(1.0, failed=((0, 1), (1, 1))))
    ],
    "own error, which the program handled": [evidence(0, OWN + "epoch\n" * 101)],
    "refused arguments": [evidence(0, TOLD, 2), evidence(1, VICTIM)],
    "its own exit code": [with_(evidence(0, "step 3\n", 75), attempts=(Attempt(1, failed=((0, 75), (1, 1))),))],
    "its own exit code, by torchrun": [evidence(0, REPORT.replace(": 1\n", ": 75 (pid: 7)\n"))],
    "no word": [evidence(0, "step 3\n", 3), evidence(1, VICTIM)],
    "a rank killed by SIGKILL": [evidence(0, REPORT.replace(": 1\n", ": -9 (pid: 7)\n"))],
    "killed by SIGSEGV": [evidence(0, "", 139)],
    "killed by SIGILL": [evidence(0, "step 3\n", 132)],
    "killed by SIGKILL": [evidence(0, "step 3\n", 137)],
    "killed by SIGTERM": [evidence(0, "step 3\n", 143)],
    "killed before its peers lost it": [evidence(0, VICTIM), evidence(1, "step 3\n", 137, finished=9.0)],
    "killed before its peer was done": [evidence(0, "step 3\n", 137, finished=9.0), evidence(1, "", 0)],
    "killed after its peer was done": [evidence(0, "step 3\n", 137), evidence(1, "step 3\n", 0, finished=8.0)],
    "killed before its peer lost it, after another was done": [
        evidence(0, VICTIM),
        evidence(1, "step 3\n", 137, finished=9.0),
        with_(evidence(2, "step 3\n", 143), attempts=(Attempt(1.0), Attempt(2.0, ended=7.0, failed=((2, -15),)))),
    ],
    "killed by the launcher's stop": [evidence(0, VICTIM), evidence(1, "step 3\n", 137, finished=14.0)],
    "left early": [evidence(0, VICTIM), evidence(1, "step 3\n", 0)],
    "left early, on the same node": [on_one_node({0: VICTIM, 1: "step 3\n"}, log=REPORT)],
    "left early, all ranks of a node": [
        evidence(2, VICTIM),
        with_(on_one_node({0: "", 1: ""}, Attempt(1.0, ranks_had_exited=True), code=143), log=STOPPED),
    ],
    "left early, in no collective": [
        evidence(0, f"{RAISED}{NCCL}remote process exited or there was a network error\n"),
        evidence(1, "step 3\n", 0),
    ],
    "all lost a peer": [evidence(0, VICTIM), evidence(1, VICTIM, finished=9.0), evidence(2, STOPPED, 143)],
    "lost its generation": [
        with_(evidence(0, "a step\n", finished=8.0), ended_generation=EndedGeneration(3, ("n1",))),
        with_(evidence(1, "a step\n", 3, finished=9.0), ended_generation=EndedGeneration(3, ("n1",))),
        with_(evidence(2, "a step\n", finished=1.0), ended_generation=EndedGeneration(2, ("n2",))),
    ],
    "all are done": [evidence(0, "step 3\n", 0), evidence(1, "step 3\n", 0)],
}
for name in [file.stem for file in ENDS]:
    CASES[name] = [evidence(0, read(name))]
    CASES[f"{name}, after its peers"] = [
        evidence(0, read("victim-collective"), finished=1.0),
        evidence(1, read(name), finished=3.0),
        evidence(2, "step 3\n", 0, finished=2.0),
    ]


def explained(ends: list[Evidence]) -> dict[str, object] | None:
    found = first_failure(ends, KNOWN)
    if found is None:
        return None
    words = found.words.splitlines()
    return {**dataclasses.asdict(found), "words": [*words[:1], *words[-1:]]}


def test_every_kind_of_end_is_explained_as_before() -> None:
    text = json.dumps({name: explained(ends) for name, ends in CASES.items()}, indent=1) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(text)
    known = json.loads(GOLDEN.read_text())
    assert known.keys() == CASES.keys()
    for name, ends in CASES.items():
        assert (name, explained(ends)) == (name, known[name])
