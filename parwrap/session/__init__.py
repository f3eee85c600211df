"""What is open while a distributed function runs: its process group, loop, strategy and interceptors, from the first line to the last.

It may import every way to train and all below. Start with ``session.py``; the other files have one duty of a session each.
"""
