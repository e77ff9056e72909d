"""Questions about plans and trainings: advise, sweep, compare, align."""
