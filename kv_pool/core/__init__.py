"""The block pool: which block ids a request gets, which blocks hold which prefix. No tensors here."""
