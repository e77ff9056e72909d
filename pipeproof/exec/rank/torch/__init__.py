"""PyTorch in the executor: tensors, communication, stages, clocks, and the endpoint process of the doctor."""
