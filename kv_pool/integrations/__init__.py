"""Ready-made connections to engines."""
