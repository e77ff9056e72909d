"""The model: its description without a framework, its stages for each framework, and its references."""
