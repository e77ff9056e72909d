"""Paddle in the executor: tensors, communication, stages, and the endpoint process of the doctor."""
