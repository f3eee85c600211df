"""Processes, threads, shared memory, and sending exceptions and values between processes: nothing here knows what a rank is.

It imports errors only.

::

    processes.py           how processes react to each other's ends
    background.py          a thread for the length of a block
    shared_memory.py       memory that processes share; shared_vectors.py: vectors of numbers in it
    remote_exception.py    an exception that is sent to another process
    structures.py          nested dicts, lists and tuples, compared between ranks
    scratch.py             files that only one rank reads
    progress_bars.py       lines beside progress bars
    wording.py             words that depend on a number
"""
