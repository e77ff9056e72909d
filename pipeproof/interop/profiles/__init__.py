"""Profiles from traces and timer logs of programs that pipeproof did not run."""
