"""Saved training states: tensors in files that other tools can read, and an index of the shards of each rank."""
