"""Fixtures available to every test."""

import signal

from tests.bed.fixtures import bed, clean_bed

__all__ = ["bed", "clean_bed"]

# A shell ignores SIGINT in background jobs; the programs that tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
