"""Dual batch size learning on a parameter server: Lu, Liu, Hong, Wu, COMPSAC 2022, and arXiv 2509.26092.

plan: each worker's share; fit: measured costs of a batch; merge: merging of weights on the server; server, worker and
run: the training.
"""
