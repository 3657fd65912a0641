# What a node says of its GPUs, InfiniBand ports and link, for launcher.health.machine. POSIX sh and coreutils, no root.
# $1: the interface that the plan chose, or nothing; $2: the folder that has sys, for tests.
# Sections begin with "@@name". Nothing is written anywhere.
LC_ALL=C
export LC_ALL
interface=${1:-} root=${2:-}
section() { printf '\n@@%s\n' "$1"; }
smi() {
  # 100 kB a GPU are lists of clocks that it could have: left out.
  {
    if command -v timeout >/dev/null; then timeout -s KILL 20 nvidia-smi -q -x; else nvidia-smi -q -x; fi 2>&1
    printf '\n@exit %s\n' "$?"
  } | grep -v supported_
}
link() {
  # The end of a veth pair gives a constant of the kernel as its speed. A VLAN, another's interface too, has its card's.
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
    # An empty entry of the GID table is zeros, and its type cannot be read (EINVAL).
    grep -s . ./*/node_type ./*/sys_image_guid ./*/ports/*/state ./*/ports/*/phys_state ./*/ports/*/rate \
      ./*/ports/*/link_layer ./*/ports/*/gids/* ./*/ports/*/gid_attrs/types/* /dev/null |
      grep -v ':0000:0000:0000:0000:0000:0000:0000:0000$'
    ls -d ./*/ports/*/gid_attrs/types
  fi
}
answer() { if command -v timeout >/dev/null; then timeout 22 cat; else cat; fi; }
if command -v nvidia-smi >/dev/null; then
  # As in facts.sh: a driver that is stuck does not let go of nvidia-smi even when it is killed.
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
