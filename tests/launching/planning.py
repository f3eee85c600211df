"""The plan for a command line, without a command."""

from parwrap.launching.plan import LaunchPlan, plan_launch


def plan(*argv: str, gpus: int = 0, cores: int = 8, **environ: str) -> LaunchPlan:
    return plan_launch(argv, environ, gpus, cores)
