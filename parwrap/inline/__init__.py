"""Ranks that a call launches: ``parwrap.launch``, notebooks and the workers of Hogwild.

The processes are started here, and what they change in the caller's objects comes back. What they run is the caller's. Start with
``launching.py``.
"""
