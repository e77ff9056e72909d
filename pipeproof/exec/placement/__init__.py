"""Placement of ranks on hosts, compared with the plan: facts of each process, traffic, a rank map, NCCL's paths."""
