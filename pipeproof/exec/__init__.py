"""Running the verified graph on real processes, and holding the result against the reference."""
