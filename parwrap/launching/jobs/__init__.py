"""Clusters that start ``parwrap.run`` on other machines, one file each; ``command/job_launchers.py`` lists them. Start with ``job.py``."""
