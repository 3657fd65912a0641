"""One run's life in three rooms, `begin`, `watch`, `end`; beside them what several of them use, and other commands."""
