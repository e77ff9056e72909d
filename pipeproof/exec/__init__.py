"""Running the verified graph on real processes, and comparing the result with the reference."""
