"""Turns ``argv`` into a ``LaunchPlan`` with pure functions, which start nothing. Start with ``plan.py``."""
