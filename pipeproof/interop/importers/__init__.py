"""Importers: plans from the configuration files of other tools."""
