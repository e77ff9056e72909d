"""Findings: codes, places in files, and their output as text, JSON and SARIF."""
