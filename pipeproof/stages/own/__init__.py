"""A person's own layers: read from their file as it is, for the stages and for the reference alike."""
