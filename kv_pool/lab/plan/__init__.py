"""Capacity plans: how much memory a trace needs, predicted from its curves and checked by replays."""
