"""pipeproof: prove, time and run pipeline-parallel training plans."""

__version__ = "0.1.0"
