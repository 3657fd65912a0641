"""The programs of a measurement: one folder in the container, beside one another, run by the image's Python 3.8+."""
