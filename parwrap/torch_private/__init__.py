"""All of torch's private names that parwrap uses, one file for each part of torch. No other file uses one; each has a test.

It imports nothing of parwrap. A file imports only the part of torch that it is about, so take names from the files. Start in
``autograd.py``. What a training step uses is torch's own function under a plain name, so that it costs no call.
"""
