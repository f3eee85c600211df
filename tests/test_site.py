"""What the site adds to the pages."""

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def test_a_section_that_folds_is_closed_and_its_title_and_links_stay(tmp_path):
    pytest.importorskip("sphinx")
    (tmp_path / "conf.py").write_text(f"import sys\nsys.path.insert(0, {str(DOCS)!r})\nextensions = ['site_pages']\n")
    (tmp_path / "index.rst").write_text(
        "Page\n====\n\nSee `Small`_.\n\n.. rst-class:: fold\n\nSmall\n-----\n\nprint\n\nLarge\n-----\n\nletters\n"
    )

    subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", tmp_path, tmp_path / "site"], check=True, timeout=100)
    text = (tmp_path / "site" / "index.html").read_text()
    folded = text.partition("<details>")[2].partition("</details>")[0]

    assert ("Small", True) == (folded.partition("<h2>")[2].partition("<")[0], "<p>print</p>" in folded)
    assert '<section class="fold" id="small">' in text
    assert 'href="#small"' in text
    assert "letters" not in folded


def test_the_small_print_of_the_contract_folds_and_the_rules_do_not():
    page = (DOCS / "contract.rst").read_text()
    rules, _, rest = page.partition("The small print\n---")
    small = rest.partition("The checks\n---")[0]

    assert small.count("\n~~~") == small.count(".. rst-class:: fold") > 5
    assert ".. rst-class:: fold" not in rules
    assert [] == [line for line in page.splitlines() if len(line) > 100]
