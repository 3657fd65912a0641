#!/bin/sh
# Boot of a node: keys in, sshd and dockerd up. Runs again, in full, after a power loss (docker kill, docker start).
set -eu
install -m 600 /etc/bed/host_key /etc/ssh/ssh_host_ed25519_key
for user in root trainer nodocker; do
    home=$(getent passwd "$user" | cut -d: -f6)
    install -d -m 700 -o "$user" -g "$user" "$home/.ssh"
    install -m 600 -o "$user" -g "$user" /etc/bed/authorized_keys "$home/.ssh/authorized_keys"
done

# cgroup v2: the engine can hand controllers to its containers only when no process sits in the root group itself
if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
    mkdir -p /sys/fs/cgroup/init
    xargs -rn1 < /sys/fs/cgroup/cgroup.procs > /sys/fs/cgroup/init/cgroup.procs || :
    sed -e 's/ / +/g' -e 's/^/+/' < /sys/fs/cgroup/cgroup.controllers > /sys/fs/cgroup/cgroup.subtree_control
fi

# An address that answers ARP and swallows everything else: what a firewalled host looks like to a client.
if [ -n "${BED_BLACKHOLE:-}" ]; then
    ip address add "$BED_BLACKHOLE/24" dev eth0
    iptables -I INPUT -d "$BED_BLACKHOLE" -j DROP
fi
# Faults go into a chain of their own, so that healing them is one flush.
iptables -N BED_FAULT
iptables -I INPUT -j BED_FAULT
iptables -I OUTPUT -j BED_FAULT

mkdir -p /run/sshd
rm -f /run/sshd.pid
/usr/sbin/sshd
(/usr/local/sbin/bed-dockerd.sh &)  # pid 1's child, so that it is reaped when a test kills it
exec sleep infinity
