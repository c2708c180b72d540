"""A running pool's control socket, its client, and what they show."""
