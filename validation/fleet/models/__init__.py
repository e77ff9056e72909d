"""Layers that Fleet and pipeproof train: ``described()``, ``loss(output, labels)`` and ``data(rng)``."""
