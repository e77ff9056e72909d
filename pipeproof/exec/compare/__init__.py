"""Comparison of a run with its reference: losses, gradients, routers, op logs, records."""
