#!/bin/sh
# sh within.sh ARGV...: executes ARGV in a running container, with the same variables as the job's processes: secrets, a
# writable home, caches.

our_kit=$(cd "${0%/*}" && pwd)
. "$our_kit/environment.sh"
exec "$@"
