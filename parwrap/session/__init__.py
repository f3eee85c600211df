"""What is open while a distributed function runs: its process group, loop, strategy and interceptors, from the first line to the last.

It may import all strategies and all rooms below them. Start with ``session.py``; each of the other files has one duty of a session.
"""
