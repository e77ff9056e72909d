"""What other tools call a model's tensors, and how they lay them out: maps from pipeproof's whole tensors to theirs."""
