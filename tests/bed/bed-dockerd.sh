#!/bin/sh
# The node's engine. Its containers sit below the node's own control group, so that pausing the node freezes them too.
rm -f /var/run/docker.pid /var/run/docker/containerd/containerd.pid
group=$(sed -n 's/^[0-9]*:freezer://p' /proc/self/cgroup)
exec dockerd ${group:+--cgroup-parent "${group%/}/containers"} >>/var/log/dockerd.log 2>&1
