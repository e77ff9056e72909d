"""6xx: every parameter's update is the sum of per-token losses that the plan declares, exactly."""
