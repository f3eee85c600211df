"""``python -m parwrap``: lists the commands."""

import argparse

import parwrap

COMMANDS = """\
commands:
  python -m parwrap.run [options] train.py [its options]
                            run a plain training script on several ranks; --help lists the options
  python -m parwrap.doctor  show what works here, what a launch would do, and each problem with its remedy
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m parwrap",
        description="Run a plain single-GPU PyTorch training function or script on many ranks, unchanged.",
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"parwrap {parwrap.__version__}")
    parser.parse_args()
    parser.print_help()


if __name__ == "__main__":
    main()
