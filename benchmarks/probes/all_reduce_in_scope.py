"""A script for parwrap.run: does what ``all_reduce_by_hand.py`` does."""

import os
import time

import parwrap

parwrap.reduce_sum(1)
os.write(1, f"reduced at {time.monotonic()}\n".encode())  # past the scope that silences all ranks but one
while os.path.exists(os.environ["PROBE_STAYS"]):
    time.sleep(0.02)
