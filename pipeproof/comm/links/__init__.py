"""How long messages and collectives take: by a plan's network, its device's data sheet or a measured profile."""
