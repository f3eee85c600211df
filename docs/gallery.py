"""Records what the examples print, for ``examples.rst``: ``python docs/gallery.py [NAME ...]`` writes ``docs/printed``."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commands(source: str) -> list[str]:
    """The commands in the docstring of an example, without those that need a GPU."""
    return re.findall(r"^((?:python|parwrap run) (?!.*--data-parallel all).*)$", source.split('"""')[1], re.MULTILINE)


def main(names: list[str]) -> None:
    for path in sorted((ROOT / "examples").glob("*.py")):
        if names and path.stem not in names:
            continue
        blocks = []
        for command in commands(path.read_text("utf-8")) or [
            f"python examples/{path.name}",
            f"parwrap run --nproc-per-node 2 examples/{path.name}",
        ]:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "examples").symlink_to(ROOT / "examples")
                program, *arguments = shlex.split(command)
                python = [sys.executable, "-W", "ignore", *(["-m", program] if program == "parwrap" else []), *arguments]
                run = subprocess.run(python, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
            shown = re.sub(r"\x1b\[\d*m", "", run.stdout).replace(f"{folder}/", "").replace("\n\n", "\n").strip()
            blocks.append(f"$ {command}\n{shown}\n")
            print(path.stem, run.returncode, flush=True)
        (ROOT / "docs" / "printed" / f"{path.stem}.txt").write_text("\n".join(blocks), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
