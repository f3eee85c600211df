"""Replaces the object behind a name, wherever the name is or will be imported, and restores the identical object.

It knows nothing about torch's calls. Start with ``patch.py``.
"""
