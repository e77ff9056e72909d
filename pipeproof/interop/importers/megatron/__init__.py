"""Importer of Megatron-LM launch scripts and argument lists."""
