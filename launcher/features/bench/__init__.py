"""`launcher doctor --bench`: measure the parts of every node in the job's image, and report slow ones."""
