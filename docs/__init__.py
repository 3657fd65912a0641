"""The documentation, and `python -m docs.generate`, which writes its reference pages."""
