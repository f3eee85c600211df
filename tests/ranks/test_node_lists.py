"""SLURM's short forms, also against SLURM's own tool if it is installed."""

import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parwrap.errors import LaunchError
from parwrap.ranks.node_lists import MOST, expanded_counts, expanded_hosts

LISTS = {
    "gpu1": ["gpu1"],
    "node[01-03,7],gpu1": ["node01", "node02", "node03", "node7", "gpu1"],
    "a[1-2]b[3-4]": ["a1b3", "a1b4", "a2b3", "a2b4"],
    "a[1-2]b[3-4],c": ["a1b3", "a1b4", "a2b3", "a2b4", "c"],
    "a[1][2]": ["a12"],
    "[1-2]": ["1", "2"],
    "n[7-10]": ["n7", "n8", "n9", "n10"],
    "n[99-101]": ["n99", "n100", "n101"],
    "n[007-010]": ["n007", "n008", "n009", "n010"],
    "n[9-011]": ["n9", "n10", "n11"],
    "n[1-2],n[2-3]": ["n1", "n2", "n2", "n3"],
    "a,b,,c": ["a", "b", "c"],
    "a b": ["a", "b"],
    "rack-1.x[2]": ["rack-1.x2"],
    "": [],
}


@pytest.mark.parametrize("text", LISTS)
def test_a_node_list_names_its_hosts(text):
    assert LISTS[text] == expanded_hosts(text)


def test_newer_slurms_allow_text_after_the_last_range():
    assert ["n1-ib", "n2-ib"] == expanded_hosts("n[1-2]-ib")


@pytest.fixture(scope="module")
def scontrol(tmp_path_factory):
    """``scontrol show hostnames``, which needs a configuration, and no daemon."""
    program = shutil.which("scontrol")
    if program is None:
        pytest.skip("needs scontrol, of Debian's slurm-client")
    configuration = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    configuration.write_text("ClusterName=test\nSlurmctldHost=localhost\nNodeName=n\nPartitionName=p Nodes=n\n")

    def show(text: str) -> list[str] | None:
        command = [program, "show", "hostnames", text]
        shown = subprocess.run(command, env={"SLURM_CONF": str(configuration)}, capture_output=True, text=True, timeout=60)
        return None if "nvalid" in shown.stdout + shown.stderr else shown.stdout.split()

    return show


@pytest.mark.parametrize("text", LISTS)
def test_scontrol_names_the_same(text, scontrol):
    assert LISTS[text] == scontrol(text)


numbers = st.integers(0, 120).map(str) | st.sampled_from(["01", "007", "099"])
ranges = numbers | st.builds("{}-{}".format, numbers, numbers)
brackets = st.lists(ranges, min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
prefixes = st.sampled_from(["n", "gpu-", "a1b", "rack2."])
hosts = st.builds("".join, st.lists(st.builds("{}{}".format, prefixes, brackets), min_size=1, max_size=2)) | prefixes
lists = st.lists(hosts, min_size=1, max_size=3).map(",".join)


def test_scontrol_reads_random_lists_the_same(scontrol):
    asked: list[str] = []

    @given(lists)
    def collect(text):
        asked.append(text)

    collect()
    for text in asked[:60]:
        try:
            found = expanded_hosts(text)
        except LaunchError:
            found = None
        assert scontrol(text) == found, text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("n[1", r"cannot parse the node list 'n\[1': it has an unmatched \["),
        ("n]", r"it has an unmatched \]"),
        ("n[[1]]", "unmatched"),
        ("n[]", r"it has \[\], which is not a range like \[1-4\]"),
        ("n[1,]", r"it has \[\], which is not a range"),
        ("n[3-1]", r"it has \[3-1\], which is not a range"),
        ("n[a-b]", r"it has \[a-b\], which is not a range"),
        ("n[1-2-3]", r"it has \[1-2-3\], which is not a range"),
        ("n[1-70000]", "it names more than 65536 hosts. SLURM sets this list: parwrap does not need it if you set MASTER_ADDR"),
        ("n[1-60000],m[1-60000]", "more than 65536 hosts"),
        ("n[1-999]m[1-999]", "more than 65536 hosts"),
        ("n" * 99 + "[", r"cannot parse the node list 'n{80}\.\.\.'"),
    ],
)
def test_an_invalid_node_list_is_refused(text, why):
    with pytest.raises(LaunchError, match=why):
        expanded_hosts(text)


def test_counts_are_repeated():
    assert [2, 2, 2, 1] == expanded_counts("2(x3),1")
    assert [4] == expanded_counts("4")


@pytest.mark.parametrize("text", ["", "2(x3", "2(3)", "a", "1,,2", "-1", "2(x99999999)", "²"])
def test_an_invalid_list_of_counts_is_refused(text):
    remedy = r"SLURM sets this list: correct SLURM_STEP_TASKS_PER_NODE, or unset it\."
    with pytest.raises(LaunchError, match=rf"cannot parse the list of tasks per node .*: it (has|covers) .*\. {remedy}"):
        expanded_counts(text)


@given(st.text("0179ab[](),-x \n\0é٣²", max_size=20))
def test_any_text_gives_a_list_or_a_launch_error(text):
    for expanded in (expanded_hosts, expanded_counts):
        try:
            found = expanded(text)
        except LaunchError:
            continue
        assert len(found) <= MOST
