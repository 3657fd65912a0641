"""The job file: what the user asked for, loaded with line-numbered errors, as frozen values."""
