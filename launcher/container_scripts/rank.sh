#!/bin/sh
# sh rank.sh ARGV...: executes ARGV, one worker, and copies its output from stdout to logs/rank-RANK.log; in a job with
# min_nodes, in which ranks can move, to the generation's folder instead of logs/. Notes in state/NODE.attempts the size
# that the log had before. ARGV replaces this shell (exec), so torchrun starts and signals the worker's own pid.

our_kit=$(cd "${0%/*}" && pwd)
export LAUNCHER_WORKER=$$ PYTHONPATH="$our_kit/torch_plugin${PYTHONPATH:+:$PYTHONPATH}" # flight_recorder.py
if [ -n "${LAUNCHER_MIG-}" ]; then # select the MIG instance of this worker from those of the node
    CUDA_VISIBLE_DEVICES=$(printf %s "$LAUNCHER_MIG" | cut -d, -f$((LOCAL_RANK + 1)))
    export CUDA_VISIBLE_DEVICES
fi
our_log=${LAUNCHER_GENERATION_OUTPUT:-$LAUNCHER_OUTPUT/logs}/rank-$RANK.log
our_attempts=$LAUNCHER_OUTPUT/state/$LAUNCHER_NODE.attempts
if [ -z "${LAUNCHER_GENERATION_OUTPUT-}" ] && [ -f "$our_attempts" ]; then # not a pipe of the program, which would block
    our_size=0
    [ ! -f "$our_log" ] || our_size=$(stat -c %s "$our_log" 2>/dev/null || wc -c <"$our_log") # stat: not on macOS
    (echo "begins $((our_size)) $RANK" >>"$our_attempts") 2>/dev/null # a full disk must not stop the job
fi
our_pipe=$our_kit/home/.rank.$RANK.$$
if [ -e "$our_pipe" ]; then rm -f "$our_pipe"; fi
if ! mkfifo -m 600 "$our_pipe"; then
    echo "launcher: no separate log for rank $RANK: cannot create a named pipe in $our_kit/home" >&2
    exec "$@"
fi
# tee exits when the worker and its children have closed the pipe. It is not a child of the worker (which may wait for
# any child), ignores the signals that stop the job or ask a rank's processes for their stacks (ABRT), which it copies;
# with setsid, it leaves the process group that torchrun kills.
exec 5<>"$our_pipe" 4<"$our_pipe" 3>"$our_pipe" 5>&- # opened for reading and writing first, so that neither end blocks
rm -f "$our_pipe"
(
    (
        trap '' HUP INT QUIT TERM PIPE ABRT
        if command -v setsid >/dev/null 2>&1; then exec setsid tee -a "$our_log"; fi
        exec tee -a "$our_log"
    ) <&4 3>&- 4<&- &
)
exec "$@" >&3 2>&1 3>&- 4<&-
