"""The executor on PyTorch: tensors, communication over gloo or NCCL, stages, and what the doctor probes."""
