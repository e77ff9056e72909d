"""Profiles from traces of programs that pipeproof did not run."""
