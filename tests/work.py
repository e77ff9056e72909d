"""The work of a function, counted: unlike a time, it is the same on every machine."""

import sys


def num_calls(function, *arguments):
    """Calls of Python's and of built-in functions until it returns."""
    count = 0

    def on_event(frame, event, argument):
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(on_event)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return count
