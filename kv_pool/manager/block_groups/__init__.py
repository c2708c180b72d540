"""How each kind of attention uses blocks: what it keeps, what a hit needs, what to cache."""
