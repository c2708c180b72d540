"""Retention: which cached blocks are kept longer than others, until when, and which are evicted first."""
