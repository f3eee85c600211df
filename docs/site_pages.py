"""What the site adds to Sphinx: links between pages as files have them, and pages that the parser and the examples write."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective

from parwrap.launching.job_launchers import launcher_named
from parwrap.launching.plan import command_parser

DOCS = Path(__file__).parent


class LinksToFiles(SphinxTransform):
    """Links such as ``<data.rst>``, which work in the repository, lead to the page of the site here."""

    default_priority = 5

    def apply(self, **options: Any) -> None:
        for link in list(self.document.findall(nodes.reference)):
            path = link.get("refuri", "")
            if path.endswith(".rst") and "://" not in path:
                page = addnodes.pending_xref(
                    "", refdomain="std", reftype="doc", reftarget=path[:-4], refexplicit=True, refdoc=self.env.docname, refwarn=True
                )
                page += nodes.inline("", link.astext())
                link.replace_self(page)


class Folds(SphinxPostTransform):
    """Sections with ``.. rst-class:: fold`` are closed until a reader opens them. Viewers of the file, such as GitHub, show them open.

    The directive ``dropdown`` would not do: GitHub leaves out what is in directives that it does not know.
    """

    default_priority = 900
    formats = ("html",)

    def run(self, **options: Any) -> None:
        for section in list(self.document.findall(nodes.section)):
            if "fold" in section["classes"]:
                opening, between, closing = ("<details><summary>", "</summary>", "</details>")
                section.insert(1, nodes.raw("", between, format="html"))
                section.insert(0, nodes.raw("", opening, format="html"))
                section.append(nodes.raw("", closing, format="html"))


def spelled(action: argparse.Action) -> str:
    """How a command line writes an option: its spellings with dashes, and its value."""
    names = ", ".join(name for name in action.option_strings if "_" not in name)
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    return names if action.nargs == 0 else f"{names} {value}"


class CommandLine(SphinxDirective):
    """``.. command-line:: run``: the options of a command, from its parser, one list for each group."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        text = help_of(self.arguments[0])
        if text:
            return [nodes.literal_block(text, text, language="text")]
        found: list[nodes.Node] = []
        for group in parser_of(self.arguments[0])._action_groups:
            actions = [each for each in group._group_actions if each.option_strings and each.help != argparse.SUPPRESS]
            if not actions:
                continue
            title = "Options of torchrun" if group.title == "options" else str(group.title)
            found.append(nodes.rubric("", title[0].upper() + title[1:]))
            rows = nodes.definition_list()
            for each in actions:
                term = nodes.term("", "", nodes.literal("", spelled(each)))
                text = " ".join((each.help or "").replace("%%", "%").split())
                rows += nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph("", text)))
            found.append(rows)
        return found


def help_of(command: str) -> str:
    """What ``parwrap COMMAND --help`` prints, of commands whose help is a text."""
    if command in ("verify", "scaling"):
        return str(importlib.import_module(f"parwrap.insight.{command}").HELP)
    if command == "doctor":
        shown = [sys.executable, "-m", "parwrap.doctor", "--help"]
        return subprocess.run(shown, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "100"}).stdout
    return ""


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of ``parwrap run``, or what a launcher adds to it."""
    if command == "run":
        return command_parser()
    parser = argparse.ArgumentParser(add_help=False)
    launcher_named(command).add_options(parser)
    return parser


class Example(SphinxDirective):
    """``.. example:: digits``: an example's first line, its commands with what they print, and its code."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = DOCS.parent / "examples" / f"{self.arguments[0]}.py"
        printed = DOCS / "printed" / f"{path.stem}.txt"
        for file in (path, printed):
            self.env.note_dependency(str(file))
        source = path.read_text("utf-8")
        first = source.split('"""')[1].strip().split("\n\n")[0]
        tabs = [
            *(".. tab-set::", "", "   .. tab-item:: What it prints", "", "      .. code-block:: console", ""),
            *(f"         {line}".rstrip() for line in printed.read_text("utf-8").splitlines()),
            *("", "   .. tab-item:: Code", "", "      .. code-block:: python", ""),
            *(f"         {line}".rstrip() for line in source.splitlines()),
        ]
        return self.parse_text_to_nodes("\n".join([re.sub(r"\s+", " ", first), "", *tabs]))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_transform(LinksToFiles)
    app.add_post_transform(Folds)
    app.add_directive("command-line", CommandLine)
    app.add_directive("example", Example)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
