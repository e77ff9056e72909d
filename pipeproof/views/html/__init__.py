"""Timelines as one HTML file that needs no network; see ``docs/timeline.md``."""
