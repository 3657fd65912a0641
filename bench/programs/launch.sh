#!/bin/sh
# A hand-written launch script: sh launch.sh NAME MASTER_ADDRESS IMAGE SITE_PACKAGES NODE...
# The ssh call that starts the container also sends the code, so each node takes one connection.
# SSH: the ssh command. The current folder is the code. SCRIPT: torchrun's worker with its arguments. PROGRAM: runs
# instead of torchrun and its worker.
# DETACH: return when the last container runs, instead of following the first node's log.
set -eu
name=$1 master=$2 image=$3 site=$4
shift 4
rank=0
for node; do
    program=${PROGRAM:-"python3 -m torch.distributed.run --nnodes $# --node_rank $rank --nproc_per_node 1 \
        --master_addr $master --master_port 29500 ${SCRIPT:-first_line.py}"}
    tar -c . | $SSH "$node" "mkdir -p job/$name && tar -x -C job/$name && docker run -d --name $name \
        --network host --ipc=host --init --user \$(id -u):\$(id -g) \
        -v /opt/venv:/opt/venv:ro -e PYTHONPATH=$site -e OMP_NUM_THREADS=1 -e HOME=/tmp -e USER=me \
        -v \$PWD/job/$name:/workspace/code -w /workspace/code $image $program" >/dev/null
    rank=$((rank + 1))
done
[ -n "${DETACH:-}" ] || exec $SSH "$1" docker logs -f "$name"
