"""What the user's loop has done so far on this rank: optimizers, backward passes, loaders, batches, and random streams.

It may import the process group. Start with ``loop_state.py``.
"""
