"""Production traces, driven through the same manager and pool that an engine would use."""
