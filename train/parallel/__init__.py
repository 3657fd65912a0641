"""How processes work together: the process group and its collectives (world), gradient averaging (ddp)."""
