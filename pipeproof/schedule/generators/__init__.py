"""One schedule, one pure function, one file; ``pipeproof.schedule.kinds`` is the table of all.

``round_robin``, ``weight_lag``, ``building_block`` and ``stage_ops`` are
what several of them share; ``optimal`` makes an order for given times with
``workload`` and ``list_schedule``, and ``solve`` proves one.
"""
