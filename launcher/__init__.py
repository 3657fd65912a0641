"""One file and one command: PyTorch training in containers on machines that have only sshd and Docker."""

__version__ = "0.1.0"
