"""World of ranks in one process: threads that run one at a time, a virtual clock, and configurable channels.

``fake_rank`` starts the ranks and has the calls of a rank program,
``fake_operations`` the operations, ``fake_engine`` decides when they are posted
and done, and ``fake_run`` explains a stall and builds a graph of the issued
operations.
"""
