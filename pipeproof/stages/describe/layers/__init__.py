"""The layers of a GPT as operations, one file for each kind of layer or sub-layer."""
