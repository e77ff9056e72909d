"""Diagnosis of hung runs from PyTorch's Flight Recorder dumps."""
