"""Intercepting torch calls: one file per call, which only forwards it to a method of an interceptor.

It may import the coordination of ranks and all rooms below it. Start with ``interceptor.py``, which declares the calls, and
``backward.py``, a small example. ``table.py`` lists all calls.
"""
