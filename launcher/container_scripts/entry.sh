#!/bin/sh
# sh entry.sh ARGV...: runs ARGV, the container's one program, and records its output and how it ended. POSIX sh with
# coreutils or busybox, as any uid. Needs LAUNCHER_OUTPUT and LAUNCHER_NODE; optional are LAUNCHER_TIMEOUT (whole seconds
# since the first start, across restarts) and LAUNCHER_HANG_TIMEOUT (seconds in which no log and no metrics of the
# output folder grow). Below LAUNCHER_OUTPUT it keeps, for this node:
#   logs/NODE.log         stdout and stderr, merged in order, appended across restarts
#   logs/NODE.clock       `<epoch seconds> <bytes of the log by then>`, at most once a second, while the log grows
#   state/NODE.attempts   `start <epoch>`, `exit <code> <epoch>`; of a rank that was suspended, `halted <rank> <epoch>`;
#                         where no rank ran any more when the program was stopped, `left <epoch>`; elastic.py adds
#                         `generation <number> <bytes of the log by then> <node,node,...> <text>`, and
#                         `ended <number> <nodes because of which it did> <text>`, `over <why it is not started again>`
#   state/NODE.began      of the first start: `<id of the machine's boot> <seconds>` (below)
# The program finds this script's pid in LAUNCHER_ENTRY: on SIGQUIT every rank prints its stack and ends; before that, and
# on SIGURG, it writes down what it waits for (flight_recorder.py).
# Exit code: ARGV's own, 128+n if signal n ended it, 124 at the time limit, 125 after a hang, 73 if the output cannot be
# written. Every variable here begins with our_, so that none of the job's environment is overwritten.

our_kit=$(cd "${0%/*}" && pwd)
our_log=$LAUNCHER_OUTPUT/logs/$LAUNCHER_NODE.log
our_clock=$LAUNCHER_OUTPUT/logs/$LAUNCHER_NODE.clock
our_attempts=$LAUNCHER_OUTPUT/state/$LAUNCHER_NODE.attempts
our_began=$LAUNCHER_OUTPUT/state/$LAUNCHER_NODE.began
our_patience=15 # seconds from the time limit to SIGKILL after a hang, 5 of them for what the ranks write down
our_grace=30 # seconds from SIGTERM to SIGKILL at the time limit
our_mark=$LAUNCHER_RUN/$LAUNCHER_NODE # the value of LAUNCHER_JOB in all of the program's processes
our_halted='^State:.[Tt]' # in /proc/PID/status: stopped, or traced
our_drain=3  # seconds that orphaned processes may keep the log open

. "$our_kit/environment.sh"

# --- the output folder
if [ -z "$LAUNCHER_OUTPUT" ] || [ -z "$LAUNCHER_NODE" ]; then refuse "LAUNCHER_OUTPUT and LAUNCHER_NODE must be set"; fi
cannot_write() {
    refuse "cannot write to $LAUNCHER_OUTPUT as uid $(id -u): look at the folder's owner and at the free disk space"
}
mkdir -p "$LAUNCHER_OUTPUT/logs" "$LAUNCHER_OUTPUT/state" "$LAUNCHER_OUTPUT/errors" 2>/dev/null || cannot_write
for our_file in "$our_log" "$our_clock" "$our_attempts"; do
    command : 2>/dev/null >>"$our_file" || cannot_write # without `command`, a failing redirection of `:` ends the shell
done

# --- one pipe for stdout and stderr keeps their order; tee ignores every signal that is meant for the job. The pipe is
# opened for reading and writing first: then neither end blocks, and nothing hangs if this shell is killed here.
our_pipe=$our_kit/home/.entry.$$
if [ -e "$our_pipe" ]; then rm -f "$our_pipe"; fi
mkfifo -m 600 "$our_pipe" || refuse "cannot make a pipe in $our_kit/home as uid $(id -u)"
exec 5<>"$our_pipe" 4<"$our_pipe" 3>"$our_pipe" 5>&-
rm -f "$our_pipe"
(
    trap '' HUP INT QUIT TERM PIPE
    exec tee -a "$our_log"
) <&4 3>&- 4<&- &
our_tee=$!
exec 4<&-

# --- the clock. look prints `<time of the last write> <bytes>` of the log; -c is GNU's and busybox's option, -f BSD's.
if stat -c '%Y %s' "$our_log" >/dev/null 2>&1; then
    look() { stat -c '%Y %s' "$our_log"; }
else
    look() { stat -f '%m %z' "$our_log"; }
fi

# Elapsed time: seconds since the machine was booted, which no step of its clock changes.
seconds() {
    if read -r our_up our_file 2>/dev/null </proc/uptime; then echo "${our_up%%.*}"; else date +%s; fi
}

# In the background, once a second: the clock, the time limit, the hang timeout, and the end of a tee whose pipe orphaned
# processes hold open. It is ended by SIGKILL, which a starting shell cannot lose; its sleep ends by itself. A job counts
# as alive while it writes: the sizes of all logs and of the metrics show that.
signs() {
    (cd "$LAUNCHER_OUTPUT" && ls -ln logs/*.log metrics.jsonl generations/*/* 2>/dev/null)
}
tick() {
    our_last='' our_late=0 our_idle=0 our_stuck=0 our_before=none our_quiet=0
    while :; do
        our_now=$(look)
        [ "$our_now" = "$our_last" ] || echo "$our_now"
        our_last=$our_now
        sleep 1 >/dev/null
        if [ -n "$our_end" ] && [ "$(seconds)" -ge "$our_end" ]; then
            [ $our_late -ne 0 ] || kill -s ALRM $$
            [ $our_late -ne $our_grace ] || kill -s KILL "$our_child"
            our_late=$((our_late + 1))
        fi
        if [ -n "$LAUNCHER_HANG_TIMEOUT" ]; then
            our_now=$(signs)
            if [ "$our_now" != "$our_before" ] || [ -e "$our_kit/home/quiet" ]; then our_quiet=$(seconds); fi
            our_before=$our_now
            if [ $(($(seconds) - our_quiet)) -ge "$LAUNCHER_HANG_TIMEOUT" ]; then
                [ $our_stuck -ne 0 ] || kill -s VTALRM $$
                [ $our_stuck -ne $our_patience ] || kill -s KILL "$our_child"
                our_stuck=$((our_stuck + 1))
            fi
        fi
        if ! kill -0 "$our_child"; then
            our_idle=$((our_idle + 1))
            [ $our_idle -ne $our_drain ] || kill -s KILL $our_tee
        fi
    done
}

note() {
    (echo "$* $(date +%s)" >>"$our_attempts") 2>/dev/null # a full disk must not end the job
}

# --- signals: TERM and INT are forwarded once each, as both the engine and a user may send them; others every time
forward() {
    our_caught=1
    case $our_sent in *$1*) return ;; esac
    our_sent="$our_sent $1" our_ranks=''
    each_rank report_halted
    [ -n "$our_ranks" ] || ! ls "$LAUNCHER_OUTPUT"/logs/rank-*.log >/dev/null 2>&1 || note left # they had begun
    kill -s "$1" $our_child 2>/dev/null
}
pass() {
    our_caught=1
    kill -s "$1" $our_child 2>/dev/null
}
over() {
    our_over=1
    echo "launcher: time limit of $LAUNCHER_TIMEOUT s reached" >&3
}
at_limit() {
    over # if this blocks because nothing reads the log, the SIGKILL of tick still comes
    forward TERM
}
# each_rank ACTION: calls ACTION with the pid and the rank of every process of a rank. torchrun has no RANK; plain
# processes also see those of other runs and nodes.
each_rank() {
    for our_name in $(grep -lsF "LAUNCHER_JOB=$our_mark" /proc/[0-9]*/environ); do
        tr '\0' '\n' 2>/dev/null <"$our_name" | grep -qxF "LAUNCHER_JOB=$our_mark" || continue
        our_rank=$(tr '\0' '\n' 2>/dev/null <"$our_name" | sed -n 's/^RANK=//p')
        our_name=${our_name%/environ}
        [ -z "$our_rank" ] || $1 "${our_name#/proc/}" "$our_rank"
    done
}
# The others wait for a rank that is suspended (SIGSTOP, a debugger), and fail before it does.
report_halted() {
    our_ranks="$our_ranks $2"
    grep -qs "$our_halted" "/proc/$1/status" || return
    echo "launcher: rank $2 does not run: its process $1 is suspended (SIGSTOP, or a debugger)" >&3
    note halted "$2"
}
# Each rank removes its pipe when it has written. NCCL, which does not, looks into its own once a second.
record() {
    our_caught=1
    for our_name in "$our_kit"/home/.flight_recorder/*; do
        if [ -p "$our_name" ]; then echo 1<>"$our_name"; fi # opened for reading too: it does not block
    done
    for our_name in 1 2 3 4 5; do
        ls "$our_kit"/home/.flight_recorder/* >/dev/null 2>&1 || break
        sleep 1
    done
}
# Every rank's Python prints its stack and ends (PYTHONFAULTHANDLER); torchrun sees them end.
stacks() {
    record
    each_rank abort
}
abort() {
    report_halted "$@"
    kill -s ABRT "$1" 2>/dev/null
    kill -s CONT "$1" 2>/dev/null
}
at_hang() {
    our_hung=1
    echo "launcher: no output and no step for $LAUNCHER_HANG_TIMEOUT s; the stacks of its ranks:" >&3
    stacks
}
# A shell starts background commands with SIGINT ignored, so Python would raise no KeyboardInterrupt. If env cannot undo
# that, SIGINT is forwarded as SIGTERM.
our_interrupt=TERM
case $1 in
    -* | *=*) ;; # env would parse it as its own option or variable
    *)
        if env --default-signal=INT,QUIT true 2>/dev/null; then
            our_interrupt=INT
            set -- env --default-signal=INT,QUIT "$@"
        fi
        ;;
esac

# --- the program
rm -rf "$our_kit/home/.flight_recorder" # the pipes of an earlier attempt
[ -z "$TORCHELASTIC_ERROR_FILE" ] || rm -f "$TORCHELASTIC_ERROR_FILE" # of an earlier attempt
note start
our_child='' our_sent='' our_end='' our_over='' our_hung='' our_code=0
if [ -n "$LAUNCHER_TIMEOUT" ]; then
    our_boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null || echo none)
    our_name='' # the file is missing at the first start
    read -r our_name our_first 2>/dev/null <"$our_began"
    if [ "$our_name" != "$our_boot" ]; then # that, or the machine was booted since: then its clock has to do
        read -r our_name our_first our_file <"$our_attempts"
        our_first=$(($(seconds) - $(date +%s) + ${our_first:-$(date +%s)}))
        (echo "$our_boot $our_first" >"$our_began") 2>/dev/null
    fi
    our_end=$((our_first + LAUNCHER_TIMEOUT))
fi
if [ -n "$our_end" ] && [ "$(seconds)" -ge "$our_end" ]; then
    over
else
    (LAUNCHER_JOB=$our_mark LAUNCHER_ENTRY=$$ && export LAUNCHER_JOB LAUNCHER_ENTRY && exec "$@") >&3 2>&1 3>&- & # exec: never a function of this script
    our_child=$!
    # Not earlier: until exec the child shell would still have these traps, and swallow a signal.
    trap 'forward TERM' TERM
    trap 'forward $our_interrupt' INT
    trap at_limit ALRM
    trap at_hang VTALRM
    trap stacks QUIT
    trap record URG
    for our_name in HUP USR1 USR2; do trap "pass $our_name" $our_name; done
    (tick) >>"$our_clock" 2>/dev/null 3>&- & # in a subshell: the function alone would keep a copy of fd 3 open
    our_ticker=$!
    # A trap interrupts `wait`, whose status is then the signal's and not the child's: wait again. 127: it ended before.
    while :; do
        our_caught=''
        wait $our_child
        our_status=$?
        if [ $our_status -ne 127 ] || [ $our_code -le 128 ]; then our_code=$our_status; fi
        if [ -z "$our_caught" ] || [ $our_code -le 128 ]; then break; fi
    done
fi

# --- the end: tee has the last bytes once every process has closed the pipe, or after our_drain seconds
trap '' HUP INT QUIT TERM USR1 USR2 ALRM VTALRM URG
exec 3>&-
wait $our_tee 2>/dev/null # where shells report a killed job
if [ -n "$our_child" ]; then
    kill -s KILL "$our_ticker"
    wait "$our_ticker" 2>/dev/null # so that its last line does not come after ours
fi
[ -z "$our_hung" ] || our_code=125
[ -z "$our_over" ] || our_code=124
(look >>"$our_clock") 2>/dev/null
note exit "$our_code"
exit "$our_code"
