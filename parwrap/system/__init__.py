"""Processes, threads, shared memory, and sending exceptions and values between processes: nothing here knows what a rank is.

It imports errors only.
"""
