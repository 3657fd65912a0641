"""The trainer: image classification under DDP and mixed precision. `python -m train --help`."""
