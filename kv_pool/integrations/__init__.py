"""Adapters for engines that have their own scheduler."""
