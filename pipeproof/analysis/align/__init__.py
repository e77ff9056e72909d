"""Bitwise comparison of records of runs, and of logs of trainings, with the first difference."""
