"""A table for each tool that starts Megatron-Core: how to recognise its files, and the meaning of its names."""
