"""Processes of a run: supervisor, watchdog, job files, rendezvous."""
