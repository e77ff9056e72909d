"""What a plan will cost: the reference model, its timeline, figures and pictures."""
