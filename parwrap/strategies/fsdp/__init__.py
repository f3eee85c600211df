"""Fully sharded data parallelism: each rank holds a part of every parameter. Start with ``fsdp.py``."""
