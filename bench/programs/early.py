"""What `launcher` does before its modules load (launcher/cli/main.py), for programs that use them without it."""

import gc

gc.set_threshold(200_000)
