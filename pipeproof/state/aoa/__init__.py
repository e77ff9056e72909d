"""AOA: statements that say which tensors of one checkpoint are made of which of another, in Paddle's language."""
