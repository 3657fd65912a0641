"""Pure functions from a job and the facts about its nodes to a Plan: `launcher plan` prints what `up` executes."""
