"""Timelines and tables as text, pictures and trace files."""
