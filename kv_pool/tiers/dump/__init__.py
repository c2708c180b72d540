"""What the file of a dumped pool consists of."""
