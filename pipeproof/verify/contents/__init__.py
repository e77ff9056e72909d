"""Contents of the buffers that rows name: what each read finds, against what its operation computes with."""
