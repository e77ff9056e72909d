"""Times of a plan from a run that was measured."""
