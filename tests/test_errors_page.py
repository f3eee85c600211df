"""``docs/errors.rst`` has an entry for every error, warning and note of the package, and none that the code no longer has."""

import ast
import re
from functools import cache
from pathlib import Path

from docutils import nodes
from docutils.core import publish_doctree

import parwrap
import parwrap.errors

PACKAGE = Path(parwrap.__file__).parent
PAGE = PACKAGE.parent / "docs" / "errors.rst"

SPEAKS = {
    *(name for name in parwrap.errors.__all__ if name.endswith("Error")),
    "EOFError",
    "warn",
    "warn_explicit",
    "_say",
    "say",
    "add_note",
    "fail",
    "print_line",
    "tell",
}
"""What is called with the text of a message. ``print`` is one too if its text begins with parwrap's name."""

LEFT_OUT = {
    "doctor/exam.py: 'not all ranks have joined'": "the doctor replaces it by where each rank is",
    "launching/agent.py: str(error)": "torch's own text about one of its options",
    "launching/routes.py: str(error)": "torch's own text about an address",
    "decorators/amp.py: f'{name}={value!r} is not {wanted}.'": "each names its option and the values that it takes",
    "decorators/opened_scope.py: line": "the summary of a run, which docs/explain.rst explains",
    "doctor/__main__.py: f'parwrap doctor: {error}'": "passes on an error",
    """inline/launching.py: 'parwrap: ' + of_sharing(size, gpus, "backend='gloo'")""": "passes on the text of ranks/device.py",
    "insight/runs.py: last[0].removeprefix(REFUSED)": "passes on an error of parwrap run",
    "insight/runs.py: f'parwrap {command}: {error}'": "passes on an error",
    "launching/jobs.py: f'parwrap run: {what}'": "passes on what is said elsewhere",
    "launching/nodes.py: f'parwrap: {lost}'": "passes on what another node has published",
    "launching/ray.py: 'stopping the job'": "what Ctrl-C did",
    "launching/slurm.py: f'cancelled job {number}'": "what Ctrl-C did",
    "launching/slurm.py: f'submitted job {number}; Ctrl-C cancels it'": "news of the job",
    "launching/slurm.py: text": "news of the job",
    "launching/waiting.py: f'parwrap: {text}'": "passes on who waits for whom",
    "run.py: f'parwrap run: {error}'": "passes on an error",
    "run.py: f'parwrap run: {plan.notice}'": "passes on the plan's notice",
    'launching/plan.py: f"{error} Your script\'s own options go after its name."': "argparse's own text",
}
"""Messages without an entry, with the reason."""

ELSEWHERE = {
    "NOTHING_READ.format(call.name)",
    "_different_kinds(everyone)",
    "_not_its_option(name, unknown, parser)",
    "_rendezvous_failure(plan, error)",
    "message.content.decode()",
    "self._not_found(os.path.basename(place), save, replaced=found is not None)",
    "text",
    "unknown_option(unknown, parser)",
    "unreachable(host, port, seconds, error, static)",
    "'\\n'.join(said)",
    "_where_all_are(pool.ranks, reports, timeout)",
}
"""Texts that another function makes: the page has its sentences."""

COMPOSED = {
    "rank ... of ... failed: ...",
    "rank ... of ... failed later at ...",
    "rank ... of ... was killed by SIGKILL (out of memory?)",
    "rank ... of ... exited with code ...",
    "rank ... of ... ended with code 0 before the end of the script, and other ranks went on without it",
    "node ... was stopped by SIGTERM",
}
"""Entries for texts that the launcher composes: who failed, and how."""

GAP = "\0"
"""What stands for a value in the text of a message."""


def texts(node):
    """The texts that an expression may have, with a gap for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in texts(node.left) for right in texts(node.right)]
    if isinstance(node, ast.IfExp):
        return [text for text in texts(node.body) + texts(node.orelse) if text != GAP] or [GAP]
    return [GAP]


@cache
def parsed():
    """The nodes of the syntax tree of each file in the package."""
    return {path.relative_to(PACKAGE).as_posix(): [*ast.walk(ast.parse(path.read_text()))] for path in sorted(PACKAGE.rglob("*.py"))}


def messages():
    """The file, the expression and the texts of each message."""
    for file, tree in parsed().items():
        for node in tree:
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                found = texts(node.args[0])
                if name in SPEAKS or (name == "print" and found[0].startswith("parwrap")):
                    yield file, ast.unparse(node.args[0]), found


def entries():
    """The texts under which the page has entries."""
    for term in publish_doctree(PAGE.read_text()).findall(nodes.term):
        for literal in term.findall(nodes.literal):
            yield literal.astext()


@cache
def pattern(entry):
    """What matches the texts that begin as ``entry`` does, where ``...`` stands for anything."""
    parts = ".*?".join(re.escape(part) for part in re.split(r"\.{3,}", entry))
    return re.compile(rf"(?:parwrap(?: run)?: )?{parts}", re.DOTALL)


def says(entry, text):
    """Whether ``text`` begins as ``entry`` does.

    >>> says("rank ... failed", "rank \\0 failed: \\0"), says("failed", "rank \\0 failed")
    (True, False)
    """
    return bool(pattern(entry).match(text.removeprefix("parwrap: ")))


ENTRIES = [entry.removeprefix("parwrap: ") for entry in entries()]


def test_an_entry_has_enough_words_to_be_found():
    assert [] == [entry for entry in ENTRIES if len(re.findall("[a-z]", entry.replace("...", ""))) < 8]


def test_every_message_has_an_entry():
    without = [
        f"{file}: {written}"
        for file, written, found in messages()
        if written not in ELSEWHERE and f"{file}: {written}" not in LEFT_OUT
        if not all(any(says(entry, text) for entry in ENTRIES) for text in found)
    ]

    assert [] == without


def test_messages_spell_the_commands_in_one_way():
    assert [] == [text for _, _, found in messages() for text in found if re.search(r"-m parwrap|parwrap\.(run|doctor)(?! does not)", text)]


def test_what_is_left_out_exists():
    there = {f"{file}: {written}" for file, written, _ in messages()}

    assert set() == LEFT_OUT.keys() - there
    assert set() == ELSEWHERE - {written for _, written, _ in messages()}


def test_every_entry_is_that_of_a_text_in_the_package():
    in_package = {
        text
        for tree in parsed().values()
        for node in tree
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)
        for text in texts(node)
    }

    assert [] == [entry for entry in ENTRIES if entry not in COMPOSED and not any(says(entry, text) for text in in_package)]
