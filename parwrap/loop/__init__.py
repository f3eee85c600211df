"""What the user's loop has done so far on this rank: optimizers, backwards, passes, batches, and the random streams that depend on it.

It may import the process group. Start with ``loop_state.py``.
"""
