"""Bit for bit: records of runs, logs of trainings, and where two of them part."""
