"""``python -m parwrap.doctor [--json]``: parses the options and runs ``command.py``, which imports torch if it can."""

from __future__ import annotations

import argparse
import os
import sys


def main() -> int:
    """Run the command and return its exit code."""
    options = _options()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # suppresses torch's stack traces of failures that are reported here in one line
    try:
        from parwrap.doctor.command import examine
    except ImportError as error:
        print(f"parwrap.doctor: {error}: install parwrap, with torch, into the environment of {sys.executable}.", file=sys.stderr)
        return 2
    return examine(options.timeout, options.backend, options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m parwrap.doctor",
        description="Show what runs here, what a launch would do, and each problem with its remedy. Under a launcher, it examines all "
        "ranks together: srun python -m parwrap.doctor. The exit code is 0 if there is no problem, 1 if there is one, and 2 if it cannot "
        "run.",
    )
    parser.add_argument("--json", action="store_true", help="Print everything as JSON.")
    parser.add_argument("--timeout", type=_seconds, default=60.0, help="Report a hang after this many seconds; by default 60.")
    parser.add_argument("--backend", help="Backend of the self test; by default the one that a launch would choose.")
    return parser.parse_args()


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
