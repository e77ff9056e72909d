"""Simulation: the SimPy reference model, the fast engine, and the memory of a step."""
