"""Container labels: the only lasting record of what runs where."""

RUN = "launcher.run"
JOB = "launcher.job"
NODE = "launcher.node"  # the node's name in the job file
HOST = "launcher.host"  # as the caller addressed it: ssh alias, user@host:port, or "local"
NODE_RANK = "launcher.node_rank"
RANKS = "launcher.ranks"  # first global rank and number of its workers: "8+8"
NODES = "launcher.nodes"  # every node's host of the run, comma separated, in rank order
SPEC = "launcher.spec"  # digest of the container's specification
CODE = "launcher.code"  # digest of the code archive
GPUS = "launcher.gpus"  # UUIDs, comma separated
OUTPUT = "launcher.output"  # the run's output folder on the node
OWNER = "launcher.owner"  # user@host of the caller
CREATED = "launcher.created"  # seconds since the epoch, by the caller's clock
VERSION = "launcher.version"
RUNTIME = "launcher.runtime"  # docker | process
PURPOSE = "launcher.purpose"  # run | shell | claim | probe: any launcher that finds a probe removes it
SPLIT = ","
