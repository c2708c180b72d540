"""Pictures of reports: hit rates over capacity, and the breakdowns of a replay."""
