"""Engines that start ``parwrap.run`` on other machines, one file each; which there are is in ``named.py``."""
