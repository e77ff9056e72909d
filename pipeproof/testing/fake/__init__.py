"""A world of ranks in one process: threads that take turns, a virtual clock, and channels that behave as chosen.

``world`` starts the ranks, ``rank`` is what a rank program is given,
``operations`` what it issues, ``engine`` decides what is posted and done and
when, ``stuck`` says why nothing can happen any more, ``recording`` makes a
graph of what was issued.
"""
