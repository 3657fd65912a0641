"""The one table of faults: what a text that a machine or a program prints means, and the fix, if it is known.

Pure: texts in, meaning and fix out. Whoever reports the fault chooses the error's class, which is the phase's.
"""
