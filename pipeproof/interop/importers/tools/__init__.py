"""A table for each tool that starts Megatron-Core: how its files are known, and what its names mean."""
