"""The fixtures of this room's tests."""

from launched import environ, parwrap_run, script, scripts, started  # noqa: F401
