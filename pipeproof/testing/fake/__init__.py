"""World of ranks in one process: threads that run one at a time, a virtual clock, and configurable channels.

``fake_world`` starts the ranks, ``fake_rank`` has the calls of a rank program,
``fake_operations`` the operations, ``fake_engine`` decides when they are posted
and done, ``stall_report`` explains a stall, and ``fake_recording`` builds a
graph of the issued operations.
"""
