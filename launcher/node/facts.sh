# Prints the facts of a node, for launcher.node.facts. POSIX sh and coreutils; without other programs, their sections are
# empty. Sections start with "@@name". Writes no files.
# nvidia-smi takes seconds if the driver is not kept loaded, and may hang: it runs in parallel, without access to this
# script's own streams.
LC_ALL=C
export LC_ALL
section() { printf '\n@@%s\n' "$1"; }
smi() {
  if command -v timeout >/dev/null; then timeout -s KILL 20 nvidia-smi "$@"; else nvidia-smi "$@"; fi 2>&1
  printf '\n@exit %s\n' "$?"
}
gpus() {
  fields=index,uuid,name,memory.total,driver_version,memory.used,pci.bus_id,compute_mode,persistence_mode,temperature.gpu
  for more in ,mig.mode.current,compute_cap ,mig.mode.current ""; do # compute_cap: from about driver 510; MIG: from 450
    found=$(smi "--query-gpu=$fields$more" --format=csv,noheader,nounits)
    case $found in *"not a valid field"*) ;; *) break ;; esac
  done
  printf '%s\n' "$found"
  if printf '%s\n' "$found" | grep -q '^[0-9].*, Enabled\(, [0-9]*\.[0-9]\)\{0,1\}$'; then
    section mig
    smi -L
  fi
}
processes() {
  found=$(smi -q -d PIDS)
  printf '%s\n' "$found"
  section owners
  getconf CLK_TCK
  cat /proc/uptime
  for pid in $(printf '%s\n' "$found" | sed -n 's/^ *Process ID *: *\([0-9][0-9]*\) *$/\1/p'); do
    stat -c '%n %U' "/proc/$pid"
    cat "/proc/$pid/stat"
  done
}
rest() {
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
section machine
cat /etc/machine-id || uname -n
section ssh
printf '%s\n' "$SSH_CONNECTION"
section cpus
nproc || getconf _NPROCESSORS_ONLN
section memory
grep -E '^Mem(Total|Available):' /proc/meminfo || cat /proc/meminfo
section shm
df -Pk -- /dev/shm
section boot
cat /proc/sys/kernel/random/boot_id
section docker_disk
df -Pk -- /var/lib/docker
section docker_inodes
df -Pi -- /var/lib/docker
# What `docker run` passes to containers; the rest of that file has logins.
section docker_proxies
head -c 100000 -- "${DOCKER_CONFIG:-$HOME/.docker}/config.json" | awk '{ text = text $0 "\n" } END {
  if (!(at = index(text, "\"proxies\""))) exit
  for (at += 9; at <= length(text); at++) {
    letter = substr(text, at, 1)
    if (letter == "{") depth++
    if (depth) printf "%s", letter
    if (letter == "}" && --depth == 0) exit
  }
}'
output=$HOME/.launcher
section output_root
(cd -P -- "$output" && pwd -P)
section output_broken
[ -e "$output" ] || readlink -- "$output"
[ -e "$output" ] || output=$HOME
section output_disk
df -Pk -- "$output"
section output_inodes
df -Pi -- "$output"
section output_mount
point=$(df -Pk -- "$output" | sed -n '$s/^.*% *//p')
grep -F " $point " /proc/mounts | tail -n 1
section addresses
PATH=$PATH:/usr/sbin:/sbin
ip -o addr show up || cat /proc/net/fib_trie
section routes
cat /proc/net/route /proc/net/ipv6_route
section tcp
grep -h " 0A " /proc/net/tcp /proc/net/tcp6 || cat /proc/net/tcp /proc/net/tcp6 # 0A: TCP_LISTEN
section infiniband
[ -d /dev/infiniband ] && echo yes
if [ -d /sys/module/nvidia_peermem ] || [ -d /sys/module/nv_peer_mem ]; then echo peermem; fi
if grep -qs 'Open Kernel Module' /proc/driver/nvidia/version; then echo dmabuf; fi
# A GID table has 256 entries: one device at a time, as arguments are limited. Unused entries are zero, and their type
# cannot be read (EINVAL).
(cd /sys/class/infiniband && for one in ./*; do
  grep -s . "$one/node_type" "$one/sys_image_guid" "$one/device/vendor" "$one"/ports/*/state "$one"/ports/*/phys_state \
    "$one"/ports/*/rate "$one"/ports/*/link_layer "$one"/ports/*/gids/* "$one"/ports/*/gid_attrs/types/* \
    "$one"/ports/*/gid_attrs/ndevs/* /dev/null | grep -v ':0000:0000:0000:0000:0000:0000:0000:0000$'
  ls -d "$one"/ports/*/gid_attrs/types "$one/device/physfn"
done) 2>/dev/null
section links
(cd /sys/class/net && for name in *; do
  read -r value <"$name/mtu" && echo "$name/mtu:$value"
  read -r own <"$name/ifindex"
  read -r lower <"$name/iflink"
  if [ -e "$name/device" ] || [ "$own" = "$lower" ]; then # a veth interface reports a kernel constant as its speed
    read -r value <"$name/speed" && echo "$name/speed:$value"
  fi
done) 2>/dev/null
section pci
grep -ls 0x10de /sys/bus/pci/devices/*/vendor | while read -r file; do
  device=${file%/vendor}
  driver=$(readlink "$device/driver")
  echo "${device##*/} $(cat "$device/class") ${driver##*/}"
done
if [ -e /proc/driver/nvidia ] || [ -e /dev/nvidia0 ] || command -v nvidia-smi >/dev/null; then
  section nvidia_files
  ls -d /dev/nvidia* /dev/nvidia-caps/*
  section nvidia_capabilities
  grep -Hs DeviceFileMinor /proc/driver/nvidia/capabilities/gpu*/mig/gi*/access \
    /proc/driver/nvidia/capabilities/gpu*/mig/gi*/ci*/access
  section nvidia_module
  cat /proc/driver/nvidia/version
  cat /proc/driver/nvidia/gpus/*/information
  section nvidia_toolkit
  nvidia-ctk --version
  grep -h '^ *mode *=' /etc/nvidia-container-runtime/config.toml
  section nvidia_cdi
  grep -ls nvidia.com/gpu /etc/cdi/* /var/run/cdi/*
  section nvidia_fabric
  systemctl is-active nvidia-fabricmanager
fi
}
answer() { if command -v timeout >/dev/null; then timeout 22 cat; else cat; fi; }
if command -v nvidia-smi >/dev/null; then
  (gpus 2>/dev/null &) | {
    exec 3<&0
    (processes 2>/dev/null &) | {
      exec 4<&0
      rest </dev/null
      section gpus
      answer <&3
      section processes
      answer <&4
    }
  }
else
  rest </dev/null
fi
section end
