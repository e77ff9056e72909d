"""One rank: its machine, adapter and transfers, and the two frameworks."""
