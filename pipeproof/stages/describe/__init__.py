"""The model without a framework: layers, parameters, boundary tensors, the cut into stages, synthetic data."""
