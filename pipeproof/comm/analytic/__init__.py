"""Times of a plan from the data sheet of a device: a roofline of its layers, and its messages and collectives."""
