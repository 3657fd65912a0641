"""Sends, receives and verifies data on a node: modules that the image's Python 3.8+ reads from stdin."""
