"""Random histories of users and faults, checked against what was true: docs/internals/histories.md."""
