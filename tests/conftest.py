"""Fixtures that every test may ask for."""

import signal

from tests.bed.fixtures import bed, clean_bed

__all__ = ["bed", "clean_bed"]

# A shell that starts us in the background has SIGINT ignored, and so would everything that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
