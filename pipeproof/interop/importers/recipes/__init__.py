"""Importers of recipes: Python functions that build the configuration of a training."""
