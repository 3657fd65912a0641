"""Dual batch size learning on a parameter server: Lu, Liu, Hong, Wu, COMPSAC 2022, and arXiv 2509.26092.

plan: each worker's share; fit: what a batch costs on this machine; merge: how the server merges weights; server, worker
and run: the training.
"""
