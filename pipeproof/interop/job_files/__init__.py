"""Job files for launchers and schedulers, which start one process per rank of a plan."""
