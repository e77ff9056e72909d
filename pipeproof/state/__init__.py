"""What training goes on from: its arrays in files that others can read, and an index of who held which part."""
