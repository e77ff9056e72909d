"""The model without a framework: layers, parameters, boundary tensors, the partition into stages, synthetic data."""
