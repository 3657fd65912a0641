"""Hangs: each rank's recording of its collectives, and what the recordings of all ranks say.

torch loads flight_recorder.py in each worker, and flight_report.py analyses the recordings in a container of the job's
image; report.py starts it and makes sentences of its answer.
"""
