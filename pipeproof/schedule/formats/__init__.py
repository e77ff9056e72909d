"""Schedules as text, read and written: our own form, PyTorch's CSV, Fleet's strings."""
