"""The device mesh, transports, what backends do, and the lowering of programs into the op graph."""
