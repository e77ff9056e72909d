"""AOA: Paddle's language of statements that map the tensors of one checkpoint to another checkpoint's."""
