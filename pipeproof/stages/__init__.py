"""The model: described without a framework, built for each framework, and once more as the reference."""
