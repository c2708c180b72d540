"""The file format of a pool dump."""
