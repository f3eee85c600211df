"""What two runs print, compared by the numbers in their lines. No run is needed."""

import logging
import sys

import pytest

from parwrap.insight.printed import Printed, compared_lines, printed_in, prints_recorded
from parwrap.ranks.group import say


def compared(one, several, again=None, ranks=2):
    lines = [[Printed(f"train.py:{7 + at}", text) for at, text in enumerate(texts)] for texts in (one, several, again or one)]
    return compared_lines(lines[0], lines[1], ranks, 1e-4, lines[2] if again is not None else None)


@pytest.mark.parametrize(
    ("one", "several"),
    [
        ("loss 0.4303", "loss 0.4304"),
        ("loss 0.430312345", "loss 0.430312999"),
        ("loss 3.1e-12", "loss 4.4e-12"),
        ("loss nan", "loss nan"),
        ("seen 997", "seen 996"),
        ("took 12.3s, 81.4 it/s", "took 14.9s, 63.0 it/s"),
        ("2026-11-28 08:40:01,123 INFO step 3", "2026-11-28 08:40:09,456 INFO step 3"),
        ("[00:03<00:09, 12.5it/s] loss 0.5", "[00:04<00:11, 9.1it/s] loss 0.5"),
        ("Training complete in 0m 3s", "Training complete in 0m 5s"),
        ("{'train_runtime': 0.7, 'train_samples_per_second': 91.1}", "{'train_runtime': 0.9, 'train_samples_per_second': 41.1}"),
        ("<Net object at 0x7f3a00>", "<Net object at 0x7f3b11>"),
        ("memory 281.2 MB, elapsed: 3.2", "memory 299.9 MB, elapsed: 4.2"),
    ],
)
def test_rounding_times_rates_and_addresses_are_no_difference(one, several):
    assert compared([one], [several]).difference is None


@pytest.mark.parametrize(
    ("one", "several", "ranks", "ratio", "reason"),
    [
        ("Acc: 0.7633", "Acc: 0.3862", 2, 0.506, "about 1/2"),
        ("correct 761/997", "correct 254/997", 3, 0.334, "about 1/3"),
        ("[80/96]", "[40/96]", 2, 0.5, "a count of what this rank has read"),
        ("loss 0.512", "loss 0.498", 2, 0.973, "is computed from this rank's share"),
        ("beta 0.9", "beta 0.3", 2, 1 / 3, "is computed from this rank's share"),
        ("1,024 tokens", "512 tokens", 2, 0.5, "a count of what this rank has read"),
    ],
)
def test_the_first_number_that_differs_is_shown_with_its_ratio(one, several, ranks, ratio, reason):
    found = compared(["epoch 1", one], ["epoch 1", several], ranks=ranks)

    assert ("train.py:8", one, several, pytest.approx([ratio], rel=0.01)) == (
        found.difference.place,
        found.difference.one,
        found.difference.several,
        found.difference.ratios,
    )
    assert (2, 1, True) == (found.lines, found.differing, reason in found.difference.reasons[0])


def test_what_differs_between_two_runs_of_one_process_is_not_compared():
    one, several, again = ["id 4711 loss 0.5"], ["id 1234 loss 0.5"], ["id 9999 loss 0.5"]

    assert compared(one, several).difference is not None
    assert compared(one, several, again).difference is None
    assert ["0.5"] == [pair[0] for pair in compared(one, ["id 1 loss 0.25"], again).difference.values]


def test_lines_are_matched_by_their_place_and_text_and_others_are_counted():
    found = compared(["loss 0.5", "saved 3"], ["loss 0.5", "skipped 3"])

    assert (1, 2, None) == (found.lines, found.other_text, found.difference)


def test_lines_of_the_script_are_recorded_and_others_are_not(tmp_path, capsys):
    logger, handler = logging.getLogger("recorded"), logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    before = sys.stdout.write
    with prints_recorded(tmp_path):
        print("loss", 0.5, end=" ")
        print("acc 1")
        print("\rstep 3", end="")
        print("\nno number")
        logger.warning("logged 4")
        print("to stderr 5", file=sys.stderr)
        say("noted 6")
    print("after 7")
    logger.removeHandler(handler)

    assert ["loss 0.5 acc 1", "logged 4", "to stderr 5"] == [line.text for line in printed_in(tmp_path)]
    assert {"test_printed.py"} == {line.place.partition(":")[0] for line in printed_in(tmp_path)}
    assert before == sys.stdout.write
    assert "logged 4" in capsys.readouterr().err
