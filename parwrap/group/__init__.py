"""The process group: starting and stopping it, its device and rendezvous, and what ranks reduce and gather.

It may import the coordination of ranks. Start with ``group.py``.
"""
