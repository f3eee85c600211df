"""Launching ranks from a function call: ``parwrap.launch``, notebooks and the workers of Hogwild.

This room starts the processes and copies their changes back to the caller's objects. The caller provides the function. Start with
``launching.py``.
"""
