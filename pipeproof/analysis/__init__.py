"""Questions about plans and trainings: tune, sweep, compare, align."""
