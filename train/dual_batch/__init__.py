"""Dual batch size learning on a parameter server: Lu, Liu, Hong, Wu, COMPSAC 2022, and arXiv 2509.26092.

plan: how much each worker gets; fit: what a batch costs here; merge: how the server takes weights in; server, worker
and run: the training.
"""
