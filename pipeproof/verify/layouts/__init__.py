"""Layout rules other than those on transports: types of the model's operations, collectives, element maps."""
