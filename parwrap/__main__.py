"""The command ``parwrap``, which is also ``python -m parwrap``: chooses one of the commands that ``parwrap --help`` lists."""

from __future__ import annotations

import os
import shlex
import sys

__all__ = ["main"]

HELP = """\
usage: parwrap COMMAND ...

  parwrap run [options] train.py [its options]   run a plain training script on several ranks
  parwrap explain [options] train.py [...]       run it, and say what parwrap did at each line
  parwrap verify [options] train.py [...]        compare it, step by step, with one process
  parwrap scaling [options] train.py [...]       time it on more and more ranks
  parwrap doctor [options]                       show what works here, and each problem with its remedy

`parwrap COMMAND --help` lists the options of a command, and `parwrap --version` prints the version.
"""


def main() -> int:
    """Run the command line of this process. Returns its exit code."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if sys.path and sys.path[0] == os.path.dirname(os.path.realpath(sys.argv[0])) and not sys.argv[0].endswith(".py"):
        sys.path[0] = os.getcwd()  # as with python -m; the folder of the command has no modules. Python has resolved links to it
    if command in ("-h", "--help"):
        print(HELP, end="")
    elif command == "--version":
        import parwrap

        print(parwrap.__name__, parwrap.__version__)
    elif command == "run":
        from parwrap.run import command as run

        del sys.argv[1]
        return run()
    elif command == "explain":
        from parwrap.run import command as run

        sys.argv[1] = "--explain"
        return run()
    elif command == "verify":
        from parwrap.insight.verify import main as verify

        return verify(sys.argv[2:])
    elif command == "scaling":
        from parwrap.insight.scaling import main as scaling

        return scaling(sys.argv[2:])
    elif command == "doctor":
        from parwrap.doctor.__main__ import main as doctor

        del sys.argv[1]
        return doctor()
    else:
        is_run = command.endswith(".py") or command.startswith("-")
        instead = f"`parwrap run {shlex.join(sys.argv[1:])}`" if is_run else "`parwrap run`, or one of those that `parwrap --help` lists"
        print(f"parwrap: there is no command {command}: write {instead}.", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
