"""Custom layers: loaded from the user's file, for the stages and for the reference."""
