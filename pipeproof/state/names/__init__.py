"""Names and layouts of other tools' checkpoints."""
