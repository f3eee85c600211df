"""The process group: starting and stopping it, its device and rendezvous, and collectives for users.

It may import the coordination of ranks. Start with ``group.py``.
"""
