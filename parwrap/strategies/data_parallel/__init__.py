"""DataParallel: one process divides each batch over several devices. Start with ``data_parallel.py``."""
