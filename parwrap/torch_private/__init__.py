"""All of torch's private names that parwrap uses, one file for each part of torch. No other file uses one; each has a test.

It imports nothing of parwrap. A file imports only its own part of torch, so take names from the files. Start in ``autograd.py``. A training
step uses torch's own function under a plain name, so that it costs no call.
"""
