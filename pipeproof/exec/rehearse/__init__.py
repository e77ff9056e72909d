"""Rehearsal of a plan's communication on real processes, with elements that identify their origin."""
