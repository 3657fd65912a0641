#!/bin/sh
# sh within.sh ARGV...: becomes ARGV, in a running container, with the same variables as the job's own processes:
# secrets, a writable home, caches.

our_kit=$(cd "${0%/*}" && pwd)
. "$our_kit/environment.sh"
exec "$@"
