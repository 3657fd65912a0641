#!/bin/sh
# sh entry.sh ARGV...: runs ARGV, the container's program, and records its output and exit code. POSIX sh with coreutils
# or busybox, as any uid. Requires LAUNCHER_OUTPUT and LAUNCHER_NODE; optional: LAUNCHER_TIMEOUT (whole seconds since
# the first start, across restarts), LAUNCHER_HANG_TIMEOUT (seconds without growth of any log or metrics in the output
# folder) and LAUNCHER_BUDGET (whole seconds since the first step of metrics.jsonl, before that since the first start).
# Files for this node in LAUNCHER_OUTPUT:
#   logs/NODE.log         stdout and stderr, merged in order, appended across restarts
#   logs/NODE.clock       `<epoch seconds> <size of the log in bytes>`, at most once a second, while the log grows
#   state/NODE.attempts   `start <epoch>`, `exit <code> <epoch>`; after a restart `begins <size of the log in bytes>`, of
#                         a rank's log with its rank (rank.sh): what is before is of earlier attempts;
#                         `halted <rank> <epoch>` for a suspended rank;
#                         `left <epoch>` if all ranks had exited before the program was stopped; `oom <epoch>` if the
#                         kernel has killed one of the container's processes for want of memory; on the node with
#                         rank 0 `stepped <epoch>` and `budget <epoch>`: its first step, and its budget; torchrun.py
#                         adds `failed <rank> <code> <epoch>` (code: negative for a signal), and `killed <rank> <epoch>` for one
#                         that did not exit in time when the program was stopped; elastic.py adds
#                         `generation <number> <size of the log in bytes> <node,node,...> <text>`,
#                         `ended <number> <nodes that caused it> <text>` and `over <why it is not restarted>`;
#                         launcher_breakpoint.py adds `waits <rank> <pid> <epoch> <place>`, taken, busy, goes and skips;
#                         launchers add `stopped <user@host> <epoch>` before they stop the container
#   state/NODE.alive      with a hang timeout: grows while a rank waits in breakpoint() (launcher_breakpoint.py)
#   state/NODE.began      for the first start: `<boot id of the machine> <seconds>` (below)
#   state/budget          not empty once the run has reached its budget: the node with rank 0 writes it, and, where
#                         nodes have folders of their own, launchers; it stops the others
# LAUNCHER_ENTRY contains this script's pid for the program: on SIGQUIT, every rank prints its stack and exits; before
# that, and on SIGURG, it records its pending collectives (flight_recorder.py).
# Exit code: that of ARGV, 128+n if signal n killed it, 0 at the budget, 124 at the time limit, 125 after a hang, 73 if
# the output cannot be written. All variables in this script start with our_, so that none of the job's environment is overwritten.
# In this order: what is known, the output folder, the log, time and notes, the budget, the signals, the clock, the
# program, its end.

our_kit=$(cd "${0%/*}" && pwd)
our_log=$LAUNCHER_OUTPUT/logs/$LAUNCHER_NODE.log
our_clock=$LAUNCHER_OUTPUT/logs/$LAUNCHER_NODE.clock
our_attempts=$LAUNCHER_OUTPUT/state/$LAUNCHER_NODE.attempts
our_began=$LAUNCHER_OUTPUT/state/$LAUNCHER_NODE.began
our_alive=$LAUNCHER_OUTPUT/state/$LAUNCHER_NODE.alive
our_budget=$LAUNCHER_OUTPUT/state/budget
our_quiet=$our_kit/home/quiet # exists while no output is expected: the program was told to end, or waits (elastic.py)
our_metrics=$LAUNCHER_OUTPUT/metrics.jsonl
our_patience=15 # seconds without output after a hang until SIGKILL, including 5 for the ranks' recordings
our_grace=45 # seconds from SIGTERM to SIGKILL at the time limit and the budget, as for `launcher down`; torchrun's ranks have 40
our_mark=$LAUNCHER_RUN/$LAUNCHER_NODE # the value of LAUNCHER_JOB in all of the program's processes
our_halted='^State:.[Tt]' # in /proc/PID/status: stopped, or traced
our_skew=60  # seconds between the starts of the nodes
our_cgroup=/sys/fs/cgroup # of the container
our_drain=3  # seconds for which the engine may not read the output, or orphaned processes keep the log open

# --- what is known of the program; '': nothing yet, or no
our_child=''          # its pid
our_exit_code=0
our_ended_at=''       # when it ended, in seconds since the epoch: this script may end later, by our_drain
our_deadline=''       # the time limit, by the clock of seconds()
our_budget_end=''     # the same of the budget
our_stepped=''        # it has made its first step, from which the budget is counted
our_caught=''         # a trap has run
our_forwarded=''      # the signals that it was sent
our_at_limit='' our_at_budget='' our_at_hang='' # why it is ended

. "$our_kit/environment.sh"

# --- the output folder
if [ -z "$LAUNCHER_OUTPUT" ] || [ -z "$LAUNCHER_NODE" ]; then refuse "LAUNCHER_OUTPUT and LAUNCHER_NODE must be set"; fi
cannot_write() {
    case $1 in
        *"uota exceeded"*) refuse "the quota on the output folder's disk is used up: remove files in $LAUNCHER_OUTPUT" ;;
        *"o space left on device"*)
            set -- $(df -Pi "$LAUNCHER_OUTPUT" 2>/dev/null | tail -n 1) # device, inodes, used, free
            [ "$4" != 0 ] || refuse "the output folder's disk has no inodes left: remove files in $LAUNCHER_OUTPUT"
            refuse "the output folder's disk is full: free some space in $LAUNCHER_OUTPUT" ;;
    esac
    refuse "cannot write to $LAUNCHER_OUTPUT as uid $(id -u): check the owner of the folder (${1##*: })"
}
our_why=$(LC_ALL=C mkdir -p "$LAUNCHER_OUTPUT/logs" "$LAUNCHER_OUTPUT/state" "$LAUNCHER_OUTPUT/errors" 2>&1) ||
    cannot_write "$our_why"
for our_file in "$our_log" "$our_clock" "$our_attempts" "$our_began" "$our_alive" "$our_budget"; do
    # made by the program in an earlier attempt; to open a named pipe would block
    if [ -e "$our_file" ] && [ ! -f "$our_file" ]; then refuse "$our_file is not a regular file: remove it"; fi
done
for our_file in "$our_log" "$our_clock" "$our_attempts"; do
    our_why=$( (: >>"$our_file") 2>&1) || cannot_write "$our_why"
done
[ -z "$LAUNCHER_HANG_TIMEOUT" ] || (: >>"$our_alive") 2>/dev/null # a full disk must not stop the job

# --- the log: one pipe for stdout and stderr preserves their order. tee writes what comes to the log, and to a second
# pipe, from which cat copies it to this script's stdout: without cat, which waits while the engine does not read, tee
# still writes the log. Both ignore all signals intended for the job.
# make_pipe NAME: a pipe at file descriptor 5; opened for reading and writing, so that neither end blocks, and nothing
# hangs if this shell is killed here.
make_pipe() {
    our_pipe=$our_kit/home/.$1.$$
    if [ -e "$our_pipe" ]; then rm -f "$our_pipe"; fi
    mkfifo -m 600 "$our_pipe" || refuse "cannot create a named pipe in $our_kit/home as uid $(id -u)"
    exec 5<>"$our_pipe"
}
make_pipe entry
exec 4<"$our_pipe" 3>"$our_pipe" 5>&-
rm -f "$our_pipe"
make_pipe shown
exec 7<"$our_pipe" 6>"$our_pipe" 5>&-
rm -f "$our_pipe"
(
    trap '' HUP INT QUIT TERM PIPE
    exec tee -a "$our_log"
) <&4 >&6 3>&- 4<&- 6>&- 7<&- &
our_tee=$!
(
    trap '' HUP INT QUIT TERM PIPE
    exec cat
) <&7 3>&- 4<&- 6>&- 7<&- &
our_cat=$!
exec 4<&- 6>&- 7<&-

# --- time, and notes in NODE.attempts
# log_state prints `<time of the last write> <bytes>` of the log; -c: GNU and busybox, -f: BSD.
if stat -c '%Y %s' "$our_log" >/dev/null 2>&1; then
    log_state() { stat -c '%Y %s' "$our_log"; }
else
    log_state() { stat -f '%m %z' "$our_log"; }
fi
our_log_before=$(log_state) # of earlier attempts: nothing has been printed yet
our_log_before=${our_log_before#* }
# Elapsed time: seconds since the machine was booted, not affected by clock adjustments.
seconds() {
    if read -r our_uptime our_rest 2>/dev/null </proc/uptime; then echo "${our_uptime%%.*}"; else date +%s; fi
}
# How many of the container's processes the kernel has killed for want of memory, of the container or of the machine:
# the engine knows only of the former, and misses some. Of plain processes it is at most the count of the root group, so
# the launcher also asks whether a process was killed.
memory_kills() {
    sed -n 's/^oom_kill //p' "$our_cgroup/memory.events" "$our_cgroup/memory/memory.oom_control" 2>/dev/null
}
note() {
    [ -p "$our_attempts" ] || # of the program; it would block
        (echo "$* ${our_ended_at:-$(date +%s)}" >>"$our_attempts") 2>/dev/null # a full disk must not stop the job
}

# --- the budget
# Whether the run has reached its budget. The file exists from the start and is opened: what is on NFS is then known.
budget_noted() {
    our_noted=''
    [ ! -f "$our_budget" ] || read -r our_noted 2>/dev/null <"$our_budget"
    [ -n "$our_noted" ]
}
# Whether metrics.jsonl has a step of this start: a line of the kind "step", or with a step and without a kind.
has_step() {
    [ -f "$our_metrics" ] && tail -c "+$((our_old_metrics + 1))" "$our_metrics" 2>/dev/null |
        grep -E '"step" *: *[0-9]' | grep -qvE '"kind" *: *"([^s]|s[^t]|st[^e])'
}
# Whether the node with rank 0 ends the run now, or another one was told so, or was not told in time.
reaches_budget() {
    if [ "${LAUNCHER_NODE_RANK:-0}" != 0 ]; then
        budget_noted || [ "$(seconds)" -ge "$our_budget_end" ]
        return
    fi
    if [ -z "$our_stepped" ] && has_step; then
        our_stepped=yes our_budget_end=$(($(seconds) + LAUNCHER_BUDGET))
        note stepped
    fi
    [ "$(seconds)" -ge "$our_budget_end" ]
}

# --- the ranks' processes
# each_rank ACTION: calls ACTION with the pid and the rank of each rank's processes. torchrun itself has no RANK. Plain
# processes also see the processes of other runs and nodes.
each_rank() {
    for our_environ in $(grep -ls "LAUNCHER_JOB=$our_mark" /proc/[0-9]*/environ); do
        tr '\0' '\n' 2>/dev/null <"$our_environ" | grep -qxF "LAUNCHER_JOB=$our_mark" || continue
        our_rank=$(tr '\0' '\n' 2>/dev/null <"$our_environ" | sed -n 's/^RANK=//p')
        our_pid=${our_environ%/environ}
        [ -z "$our_rank" ] || $1 "${our_pid#/proc/}" "$our_rank"
    done
}
# The other ranks wait for a suspended rank (SIGSTOP or a debugger) and fail before it does.
report_halted() {
    our_ranks="$our_ranks $2"
    grep -qs "$our_halted" "/proc/$1/status" || return
    echo "launcher: rank $2 is not running: its process $1 is suspended (SIGSTOP or a debugger)" >&3
    note halted "$2"
}
# Each rank removes its pipe after writing its recording. NCCL does not; it polls its own pipe once a second.
record() {
    our_caught=1
    for our_recording in "$our_kit"/home/.flight_recorder/*; do
        if [ -p "$our_recording" ]; then echo 1<>"$our_recording"; fi # also opened for reading, so that it does not block
    done
    for our_second in 1 2 3 4 5; do
        ls "$our_kit"/home/.flight_recorder/* >/dev/null 2>&1 || break
        sleep 1
    done
}
# Every rank's Python prints its stack and exits (PYTHONFAULTHANDLER); torchrun notices that.
stacks() {
    record
    each_rank abort
}
abort() {
    report_halted "$@"
    kill -s ABRT "$1" 2>/dev/null
    kill -s CONT "$1" 2>/dev/null
}

# --- signals from outside. TERM and INT are forwarded only once each, because both the engine and a user may send them
forward() {
    our_caught=1
    case $our_forwarded in *$1*) return ;; esac
    our_forwarded="$our_forwarded $1" our_ranks=''
    each_rank report_halted
    [ -n "$our_ranks" ] || ! ls "$LAUNCHER_OUTPUT"/logs/rank-*.log >/dev/null 2>&1 || note left # the ranks had started
    [ "$1" != TERM ] || (: >"$our_quiet") 2>/dev/null # it may save without a word
    kill -s "$1" $our_child 2>/dev/null
}
pass() {
    our_caught=1
    kill -s "$1" $our_child 2>/dev/null
}

# --- signals from tick, below: ALRM at the time limit, PROF at the budget, VTALRM after a hang. What ends the program
# first, counts.
end_for_limit() {
    our_at_limit=1
    echo "launcher: time limit of $LAUNCHER_TIMEOUT s reached" >&3
}
# The launcher reads the note, other nodes the file.
end_for_budget() {
    our_at_budget=1
    if [ "${LAUNCHER_NODE_RANK:-0}" != 0 ]; then
        echo "launcher: the run has reached its budget of $LAUNCHER_BUDGET s" >&3
        return
    fi
    note budget
    (date +%s >"$our_budget") 2>/dev/null # a full disk: a launcher tells the other nodes
    our_since="its start: metrics.jsonl has no step"
    if grep -qs '^stepped ' "$our_attempts"; then our_since="its first step"; fi
    echo "launcher: budget of $LAUNCHER_BUDGET s reached, counted from $our_since" >&3
}
at_limit() {
    our_caught=1
    [ -z "$our_at_budget$our_at_hang" ] || return
    case $our_forwarded in *TERM*) return ;; esac
    end_for_limit # if this blocks because the log is not read, tick still sends SIGKILL
    forward TERM
}
at_budget() {
    our_caught=1
    [ -z "$our_forwarded$our_at_limit$our_at_hang" ] || return
    end_for_budget
    forward TERM
}
at_hang() {
    our_caught=1
    [ -z "$our_at_limit$our_at_budget" ] || return
    our_at_hang=1
    echo "launcher: no output and no step for $LAUNCHER_HANG_TIMEOUT s; stacks of the ranks:" >&3
    stacks
}

# --- the clock, in the background, once a second: update the clock file, check the limits, the budget and whether it
# hangs; after its end, kill cat if nobody reads what it writes, then tee if orphaned processes keep its pipe open. It is
# stopped by SIGKILL, which a starting shell cannot miss; its sleep exits on its own. A job is considered alive while the
# sizes of its logs or metrics change, or a rank is debugged.
signs() {
    (cd "$LAUNCHER_OUTPUT" && ls -ln logs/*.log state/*.alive metrics.jsonl generations/*/* 2>/dev/null)
}
tick() { # $$: the pid of the main shell, in a subshell, too
    our_late=0 our_over_budget=0 our_drained=0 # seconds since the limit, the budget, the program's end
    our_state_before='' our_signs_before=none our_last_sign=0 our_stuck=''
    our_silence=$LAUNCHER_HANG_TIMEOUT # seconds: until a hang, after one until SIGKILL; '': not awaited
    while :; do
        our_state=$(log_state)
        [ "$our_state" = "$our_state_before" ] || echo "$our_state"
        our_state_before=$our_state
        sleep 1 >/dev/null
        if [ -n "$our_deadline" ] && [ "$(seconds)" -ge "$our_deadline" ]; then
            [ $our_late -ne 0 ] || kill -s ALRM $$
            [ $our_late -ne $our_grace ] || kill -s KILL "$our_child"
            our_late=$((our_late + 1))
        fi
        if [ -n "$LAUNCHER_BUDGET" ] && { [ $our_over_budget -ne 0 ] || reaches_budget; }; then
            [ $our_over_budget -ne 0 ] || kill -s PROF $$
            [ $our_over_budget -ne $our_grace ] || kill -s KILL "$our_child"
            our_over_budget=$((our_over_budget + 1))
        fi
        if [ -n "$our_silence" ]; then
            our_signs=$(signs)
            if [ "$our_signs" != "$our_signs_before" ] || { [ -z "$our_stuck" ] && [ -e "$our_quiet" ]; }; then
                our_last_sign=$(seconds)
            fi
            our_signs_before=$our_signs
            if [ $(($(seconds) - our_last_sign)) -ge "$our_silence" ]; then
                if [ -z "$our_stuck" ]; then
                    kill -s VTALRM $$
                    our_stuck=yes our_silence=$our_patience our_last_sign=$(seconds)
                else
                    kill -s KILL "$our_child"
                    our_silence=''
                fi
            fi
        fi
        if ! kill -0 "$our_child"; then
            our_drained=$((our_drained + 1))
            [ $our_drained -ne $our_drain ] || kill -s KILL $our_cat
            [ $our_drained -ne $((our_drain + 1)) ] || kill -s KILL $our_tee
        fi
    done
}

# --- before the program starts
# Shells start background commands with SIGINT ignored, so Python would not raise KeyboardInterrupt. If env cannot reset
# it, SIGINT is forwarded as SIGTERM.
our_interrupt=TERM
case $1 in
    -* | *=*) ;; # env would parse it as an option or a variable
    *)
        if env --default-signal=INT,QUIT true 2>/dev/null; then
            our_interrupt=INT
            set -- env --default-signal=INT,QUIT "$@"
        fi
        ;;
esac
# The program may open many files, as data loaders do: newer engines set a soft limit of 1024.
our_files=65536 our_hard=$(ulimit -Hn) our_soft=$(ulimit -Sn)
if [ "$our_hard" != unlimited ] && [ "$our_hard" -lt $our_files ]; then our_files=$our_hard; fi
if [ "$our_soft" != unlimited ] && [ "$our_soft" -lt "$our_files" ]; then ulimit -Sn "$our_files"; fi

[ -z "$our_no_cache" ] || echo "launcher: node $LAUNCHER_NODE: nothing is cached for the next run: $our_no_cache" >&3
rm -rf "$our_kit/home/.flight_recorder" "$our_quiet" # the pipes of an earlier attempt; it was told to end
[ -z "$TORCHELASTIC_ERROR_FILE" ] || rm -f "$TORCHELASTIC_ERROR_FILE" # of an earlier attempt
our_kills_before=$(memory_kills)
# cat says why it cannot write, unlike the echo of some shells
our_start="start $(date +%s)"
[ "$our_log_before" = 0 ] || our_start=$(printf '%s\nbegins %s' "$our_start" "$our_log_before")
our_why=$( (echo "$our_start" | LC_ALL=C cat >>"$our_attempts") 2>&1) || cannot_write "$our_why"
# When the time limit and the budget are reached. Times are those of seconds(), which begins anew when the machine boots.
if [ -n "$LAUNCHER_TIMEOUT$LAUNCHER_BUDGET" ]; then
    our_boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null || echo none)
    our_first_boot='' # the file is missing at the first start
    read -r our_first_boot our_first_start 2>/dev/null <"$our_began"
    if [ "$our_first_boot" != "$our_boot" ]; then # first start, or the machine was rebooted: use its clock
        read -r our_word our_first_start our_rest <"$our_attempts" # `start <epoch>`
        our_first_start=$(($(seconds) - $(date +%s) + ${our_first_start:-$(date +%s)}))
        (echo "$our_boot $our_first_start" >"$our_began") 2>/dev/null
    fi
    [ -z "$LAUNCHER_TIMEOUT" ] || our_deadline=$((our_first_start + LAUNCHER_TIMEOUT))
fi
if [ -n "$LAUNCHER_BUDGET" ]; then
    (: >>"$our_budget") 2>/dev/null
    our_old_metrics=0 # bytes
    [ ! -f "$our_metrics" ] || our_old_metrics=$(wc -c <"$our_metrics") # of an earlier run, which is resumed
    our_budget_end=$((our_first_start + LAUNCHER_BUDGET))
    our_first_step=$(sed -n '/^stepped [0-9]*$/{s/stepped //p;q;}' "$our_attempts") # before a restart
    if [ -n "$our_first_step" ]; then
        our_stepped=yes our_budget_end=$(($(seconds) - $(date +%s) + our_first_step + LAUNCHER_BUDGET))
    fi
    # Not told by then: the first node has ended, as its first step came within one budget, or never.
    [ "${LAUNCHER_NODE_RANK:-0}" = 0 ] || our_budget_end=$((our_budget_end + LAUNCHER_BUDGET + our_skew))
fi

# --- the program, unless its time was over before
if [ -n "$LAUNCHER_BUDGET" ] && { budget_noted || reaches_budget; }; then
    end_for_budget
elif [ -n "$our_deadline" ] && [ "$(seconds)" -ge "$our_deadline" ]; then
    end_for_limit
else
    (LAUNCHER_JOB=$our_mark LAUNCHER_ENTRY=$$ && export LAUNCHER_JOB LAUNCHER_ENTRY && exec "$@") >&3 2>&1 3>&- & # exec: never a function of this script
    our_child=$!
    # Not earlier: until exec, the child shell would have these traps and lose a signal.
    trap 'forward TERM' TERM
    trap 'forward $our_interrupt' INT
    trap at_limit ALRM
    trap at_budget PROF
    trap at_hang VTALRM
    trap stacks QUIT
    trap record URG
    for our_signal in HUP USR1 USR2; do trap "pass $our_signal" $our_signal; done
    (tick) >>"$our_clock" 2>/dev/null 3>&- & # in a subshell: a plain function call would keep a copy of fd 3 open
    our_ticker=$!
    # A trap interrupts `wait`, which then returns 128 + the signal, as for a child that it killed: so wait again after
    # each trap. 127: `wait` had returned the child's own status before.
    while :; do
        our_caught=''
        wait $our_child
        our_status=$?
        if [ $our_status -ne 127 ] || [ $our_exit_code -le 128 ]; then our_exit_code=$our_status; fi
        if [ -z "$our_caught" ] || [ $our_exit_code -le 128 ]; then break; fi
    done
    our_ended_at=$(date +%s)
fi

# --- how it ended
[ "$(memory_kills)" = "$our_kills_before" ] || note oom
# The program of another node may have failed before the node was told, as it has lost rank 0.
if [ -n "$LAUNCHER_BUDGET" ] && [ "$our_exit_code" -ne 0 ] && [ -z "$our_forwarded$our_at_limit$our_at_hang$our_at_budget" ] && budget_noted; then
    end_for_budget
fi
if [ -n "$our_at_budget" ]; then
    case $our_exit_code in
        0 | 137 | 143) ;;
        *) echo "launcher: the program exited with code $our_exit_code after that" >&3 ;;
    esac
fi
if [ -n "$our_at_limit$our_at_budget" ] && [ "$our_exit_code" -eq 137 ]; then
    echo "launcher: the program did not exit within $our_grace s of SIGTERM and was killed: what it was saving may be incomplete" >&3
fi

# --- the end: tee has received all output once every process has closed the pipe, or after a second more than our_drain
trap '' HUP INT QUIT TERM USR1 USR2 ALRM VTALRM PROF URG
exec 3>&-
wait $our_tee 2>/dev/null # shells report killed jobs to stderr
wait $our_cat 2>/dev/null
if [ -n "$our_child" ]; then
    kill -s KILL "$our_ticker"
    wait "$our_ticker" 2>/dev/null # so that its last line is written before the final one
fi
[ -z "$our_at_hang" ] || our_exit_code=125
[ -z "$our_at_limit" ] || our_exit_code=124
[ -z "$our_at_budget" ] || our_exit_code=0
[ -p "$our_clock" ] || (log_state >>"$our_clock") 2>/dev/null
note exit "$our_exit_code"
exit "$our_exit_code"
