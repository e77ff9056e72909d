"""The device mesh, transports, the behaviour of backends, and the lowering of programs into the op graph."""
