"""Memory of a simulated step: what each rank holds over time, in bytes, and what its peak is made of."""
