"""Ranks that a call starts: ``parwrap.launch``, ``@distributed(nprocs=...)`` and notebooks."""
