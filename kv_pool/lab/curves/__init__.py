"""Hit rates of LRU and of optimal replacement at every capacity, from one reading of a trace."""
