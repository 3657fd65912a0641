# One look at a node, for launcher.node.facts. POSIX sh and coreutils; whatever else is missing leaves its section empty.
# Sections begin with "@@name". Nothing is written anywhere.
LC_ALL=C
export LC_ALL
section() { printf '\n@@%s\n' "$1"; }
section time
date +%s.%N
section user
id -un
id -u
id -g
id -G
section home
printf '%s\n' "$HOME"
section host
uname -n
uname -m
section ssh
printf '%s\n' "$SSH_CONNECTION"
section cpus
nproc || getconf _NPROCESSORS_ONLN
section memory
grep MemTotal /proc/meminfo || cat /proc/meminfo
section shm
df -Pk -- /dev/shm
section docker_disk
df -Pk -- /var/lib/docker
section addresses
PATH=$PATH:/usr/sbin:/sbin
ip -o addr show up || cat /proc/net/fib_trie
section routes
cat /proc/net/route
section tcp
grep -h " 0A " /proc/net/tcp /proc/net/tcp6 || cat /proc/net/tcp /proc/net/tcp6 # 0A: it listens
section infiniband
[ -d /dev/infiniband ] && echo yes
section gpus
if command -v nvidia-smi >/dev/null; then
  set -- nvidia-smi --query-gpu=index,uuid,name,memory.total,driver_version --format=csv,noheader,nounits
  if command -v timeout >/dev/null; then timeout 20 "$@"; else "$@"; fi
fi
section end
