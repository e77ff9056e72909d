"""Arguments with which frameworks launch the training of a plan: the inverse of the importers."""
