"""Timelines as one HTML file that needs no network; see ``docs/pictures.md``."""
