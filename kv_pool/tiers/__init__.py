"""Colder homes for blocks: host memory, a folder on disk; and pools that outlive their process."""
