"""Megatron-LM: launch scripts and argument lists as plans."""
