"""The rules: one code each, over the op graph, with witnesses."""
