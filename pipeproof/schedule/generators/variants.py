"""Whose orders of interleaved 1F1B there are: names that can be read without loading a generator."""

from __future__ import annotations

VARIANTS = ("torch", "megatron", "fleet", "fleet_fthenb", "fleet_balanced")
"""The first is meant where none is named."""
