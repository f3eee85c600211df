"""What is open while a distributed function runs: its process group, loop, strategy and interceptors, from the first line to the last.

It may import every way to train and all below. Start with ``session.py``; the other files are single duties of a session.
"""
