"""Flight Recorder dumps of PyTorch: what a hung run waits for."""
