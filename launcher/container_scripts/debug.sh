#!/bin/sh
# sh debug.sh RANK: the terminal of a process of this rank that waits in breakpoint(), the first one. Exit code 3: none.

our_kit=$(cd "${0%/*}" && pwd)
for our_file in "$our_kit/home/.debug/$1".*.python; do
    [ -S "${our_file%.python}" ] || continue
    exec "$(cat "$our_file")" -I "$our_kit/debug_client.py" "${our_file%.python}" "$1"
done
exit 3
