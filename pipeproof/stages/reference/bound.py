def parallel_bound(plan):
    return 1e-3
