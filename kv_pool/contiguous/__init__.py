"""Blocks with consecutive ids: finding them, and moving others out of the way."""
