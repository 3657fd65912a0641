"""After a run, or to end it: how it ended and why, what is fetched, stopped and removed."""
