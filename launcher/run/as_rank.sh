# Arguments: a rank, then a command. Executes the command with the environment of the rank's process. within.sh runs
# this script in the rank's container. Needs POSIX sh, coreutils or busybox, and /proc. Exit code 3: no such rank here.
our_rank=$1
shift
our_mark=LAUNCHER_JOB=$LAUNCHER_RUN/$LAUNCHER_NODE # set by entry.sh for every process of the program
our_line='
'
has() { case "$our_line$our_vars$our_line" in *"$our_line$1$our_line"*) ;; *) false ;; esac; }
is_worker() { # started by rank.sh, not one of its children; the program of run.command has no rank.sh
    case "$our_line$our_vars" in *"${our_line}LAUNCHER_WORKER="*) has "LAUNCHER_WORKER=$1" ;; esac
}
our_found=''
for our_file in $(grep -ls "$our_mark" /proc/[0-9]*/environ); do
    our_vars=$(tr '\n\0' '\001\n' 2>/dev/null <"$our_file") # one variable per line; \001 replaces newlines in values
    our_pid=${our_file%/environ}
    if has "$our_mark" && has "RANK=$our_rank" && is_worker "${our_pid#/proc/}"; then
        our_found=$our_pid
        break
    fi
done
if [ -z "$our_found" ]; then
    echo "launcher: no process of rank $our_rank runs on node $LAUNCHER_NODE; see: launcher status" >&2
    exit 3
fi
# Export the variables, except those that are read-only in bash; TERM stays that of the terminal.
our_script="/^E*UID=/d; /^PPID=/d; /^SHELLOPTS=/d; /^BASHOPTS=/d; /^TERM=/d; s/'/'\\\\''/g"
our_script="$our_script; s/^\\([A-Za-z_][A-Za-z0-9_]*\\)=\\(.*\\)\$/export \\1='\\2'/p"
eval "$(printf '%s\n' "$our_vars" | LC_ALL=C sed -n "$our_script" | tr '\001' '\n')"
unset LAUNCHER_JOB LAUNCHER_ENTRY LAUNCHER_WORKER # the command must not be signalled as a process of the run
exec "$@"
