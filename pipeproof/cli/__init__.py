"""The command line: one module per command, shared options, and the registry of codes."""
