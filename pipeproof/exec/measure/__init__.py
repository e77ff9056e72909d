"""Measurements of a machine and of runs: doctor, links, profiles."""
