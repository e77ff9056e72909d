"""What moves where, drawn."""
