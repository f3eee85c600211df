"""All of torch's private names that parwrap uses, one file for each part of torch. No other file uses one; each has a test.

It imports nothing else of parwrap. Each file imports only its own part of torch, so import names from the files. Start with
``autograd.py``. What a training step calls is torch's own function under a plain name, because a wrapper would cost a call.
"""
