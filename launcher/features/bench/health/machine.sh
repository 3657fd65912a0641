# Prints the state of GPUs, InfiniBand ports and the link for launcher.features.bench.health.machine. POSIX sh and coreutils, no root.
# $1: the interface chosen by the plan, or empty; $2: the folder that contains sys, for tests.
# Sections start with "@@name". The script writes no files.
LC_ALL=C
export LC_ALL
interface=${1:-} root=${2:-}
section() { printf '\n@@%s\n' "$1"; }
smi() {
  # Drop the lists of supported clocks: 100 kB per GPU.
  {
    if command -v timeout >/dev/null; then timeout -s KILL 20 nvidia-smi -q -x; else nvidia-smi -q -x; fi 2>&1
    printf '\n@exit %s\n' "$?"
  } | grep -v supported_
}
link() {
  # A veth interface reports a kernel constant as its speed; a VLAN interface reports that of its card.
  if [ -e device ] || [ "$(cat iflink)" = "$(cat ifindex)" ] || grep -qs DEVTYPE=vlan uevent; then
    grep -s . speed /dev/null
  fi
  grep -s . mtu duplex /dev/null
}
rest() {
  section link
  printf 'name:%s\n' "$interface"
  [ -z "$interface" ] || (cd "$root/sys/class/net/$interface" && link)
  section infiniband
  if cd "$root/sys/class/infiniband"; then
    # Empty entries of the GID table are zero, and their type cannot be read (EINVAL).
    grep -s . ./*/node_type ./*/sys_image_guid ./*/ports/*/state ./*/ports/*/phys_state ./*/ports/*/rate \
      ./*/ports/*/link_layer ./*/ports/*/gids/* ./*/ports/*/gid_attrs/types/* /dev/null |
      grep -v ':0000:0000:0000:0000:0000:0000:0000:0000$'
    ls -d ./*/ports/*/gid_attrs/types
  fi
}
answer() { if command -v timeout >/dev/null; then timeout 22 cat; else cat; fi; }
if command -v nvidia-smi >/dev/null; then
  # As in facts.sh: with a stuck driver, nvidia-smi does not exit even after SIGKILL.
  (smi 2>/dev/null &) | {
    exec 3<&0
    rest </dev/null 2>/dev/null
    section nvidia_smi
    answer <&3
  }
else
  rest </dev/null 2>/dev/null
fi
section end
