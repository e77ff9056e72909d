"""Single-process references that runs are compared with. They share no code with the stages."""
