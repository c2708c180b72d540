"""Swap requests to a pool in host memory and back, by plans in two phases."""
