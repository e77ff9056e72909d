"""Training of a user's own modules in the user's own processes: the runtime behind `pipeproof.torch` and `.paddle`."""
