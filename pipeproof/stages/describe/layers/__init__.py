"""The layers of a GPT as operations: ``attention``, ``mlp`` with experts, and the rest in ``layer_operations``."""
