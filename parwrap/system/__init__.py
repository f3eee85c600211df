"""Processes, threads, shared memory, and exceptions and values that go between processes: nothing here knows what a rank is.

It imports errors only.
"""
