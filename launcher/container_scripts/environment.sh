#!/bin/sh
# Sourced by entry.sh and within.sh, which set our_kit. Sets the variables that a job's processes have in addition to
# the container's own. On failure, prints an error and exits the shell with code 73.

refuse() {
    echo "launcher: node $LAUNCHER_NODE: $1" >&2
    exit 73
}

# --- secrets: the content of each file is the value. The x prevents the substitution from dropping trailing newlines.
if [ -d "$our_kit/secrets" ] && ! ls "$our_kit/secrets" >/dev/null 2>&1; then
    refuse "cannot read the secrets in $our_kit/secrets as uid $(id -u)"
fi
for our_file in "$our_kit"/secrets/*; do
    [ -f "$our_file" ] || continue
    our_name=${our_file##*/}
    case $our_name in
        [0-9]* | *[!A-Za-z0-9_]*) refuse "secret $our_name: not a valid variable name; use letters, digits and _" ;;
    esac
    our_value=$(cat "$our_file" && printf x) || refuse "cannot read the secret $our_name as uid $(id -u)"
    export "$our_name=${our_value%x}"
done
unset our_value

# --- a home, a user name and caches, for a uid that is unknown in the image (getpass and torch's compiler need them)
if ! { [ -n "$HOME" ] && [ -d "$HOME" ] && [ -w "$HOME" ]; }; then export HOME="$our_kit/home"; fi
if [ -z "$USER" ]; then USER=$(id -un 2>/dev/null) || USER=uid$(id -u); fi
export USER LOGNAME="${LOGNAME:-$USER}"
export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$HOME/.cache}"
# usable FOLDER: whether it is mounted, and can be used: several processes lock its files. our_no_cache: why not
our_no_cache=''
usable() {
    [ -d "$1" ] || return
    [ -w "$1" ] || our_no_cache="$1 is not writable for uid $(id -u)"
    if command -v flock >/dev/null 2>&1 && [ -w "$1" ]; then
        flock -s -n "$1" true 2>/dev/null || our_no_cache="the disk of $1 has no locks"
    fi
    [ -z "$our_no_cache" ]
}
our_cache=$XDG_CACHE_HOME
if usable "$our_kit/cache"; then
    our_cache=$our_kit/cache
    export LAUNCHER_CACHE="$our_cache" CUDA_CACHE_PATH="${CUDA_CACHE_PATH:-$our_cache/cuda}"
fi
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$our_cache/torchinductor}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$our_cache/triton}"
if usable "$our_kit/models"; then
    export HF_HOME="${HF_HOME:-$our_kit/models/huggingface}" TORCH_HOME="${TORCH_HOME:-$our_kit/models/torch}"
fi
export TORCH_HOME="${TORCH_HOME:-$XDG_CACHE_HOME/torch}"
export MPLCONFIGDIR="${MPLCONFIGDIR:-${XDG_CONFIG_HOME:-$HOME/.config}/matplotlib}"

# --- breakpoint() waits for `launcher debug`, if the plan says so, or else is skipped, said; it is the job's if that sets it
export PYTHONBREAKPOINT="${PYTHONBREAKPOINT:-launcher_breakpoint.skip}"
case $PYTHONBREAKPOINT in
    launcher_breakpoint.*) export PYTHONPATH="$our_kit/modules${PYTHONPATH:+:$PYTHONPATH}" ;;
esac
