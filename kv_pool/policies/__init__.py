"""Cache policies: which cached blocks a pool evicts. One policy per file; see README.md."""
