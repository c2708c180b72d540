"""A trace that is replayed in real time, through a pool that other commands can reach."""
