"""Scripts of the flight recorder: loaded by each worker, and run in the job's image after a hang."""
