"""Blocks move between pools of one process, of several, and of several nodes."""
