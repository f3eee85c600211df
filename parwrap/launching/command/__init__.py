"""From ``argv`` to a ``LaunchPlan``: pure functions, which start nothing. Start with ``plan.py``."""
