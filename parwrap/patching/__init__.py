"""Changes what a name stands for, wherever it is or will be imported, and restores the identical object.

It knows nothing of torch's calls. Start with ``patch.py``.
"""
