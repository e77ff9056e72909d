"""A page on which schedules are changed and timed in the browser; see ``docs/play.md``."""
