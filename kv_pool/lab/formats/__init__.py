"""Readers and writers of traces and request logs of other projects."""
