"""Detection of slow components: the schedule of measurements and their evaluation. Pure."""
