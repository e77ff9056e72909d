"""What a step takes when nothing takes exactly its time: random noise, slow ranks, and whose delay costs most."""
