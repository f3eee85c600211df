"""Carries out a plan on each node: torch's agent, the fork server, output, failures, and messages between nodes.

Start with ``agent.py`` for the launcher's side and with ``script_run.py`` for a rank's.
"""
