"""Layout rules beside the transports: types through the model's operations, issued collectives, index maps."""
