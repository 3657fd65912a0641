#!/bin/sh
# sh within.sh ARGV...: becomes ARGV in a container whose entry.sh runs already, with the variables of the job's own
# processes: secrets, a home that can be written, caches.

our_kit=$(cd "${0%/*}" && pwd)
. "$our_kit/environment.sh"
exec "$@"
