"""The executor on Paddle: tensors, communication over gloo, stages, and the process that the doctor probes."""
