"""Parallel training: the process group (world), choice of method (methods), DDP, DataParallel, model and pipeline."""
