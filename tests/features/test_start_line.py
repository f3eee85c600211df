"""The line at the start of training. What it says of each feature is in the tests of that."""

import sys

import pytest
from tqdm import tqdm

from parwrap.features.start_line import say


@pytest.mark.parametrize("bars", [0, 1])
def test_it_is_a_line_by_itself_also_beside_a_progress_bar(bars, capsys):
    open_bars = [tqdm(total=2, file=sys.stderr) for _ in range(bars)]
    say("parwrap: 2 ranks")
    for bar in open_bars:
        bar.close()

    assert "parwrap: 2 ranks" in capsys.readouterr().err.splitlines()
