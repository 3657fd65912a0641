"""The test bed: a real cluster on one Linux machine, each node with its own sshd, Docker engine and address."""
