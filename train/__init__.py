"""The trainer: image classification with DDP and mixed precision. `python -m train --help`."""
