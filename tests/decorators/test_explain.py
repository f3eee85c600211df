"""``@explain``: what the table says of a loop on two ranks."""

import io
import json
import os
import re
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import parwrap
from parwrap.decorators.explained_page import Note, page
from parwrap.places import Place
from terminal import shown


def data(size=12):
    return TensorDataset(torch.arange(float(size))[:, None])


class Loop:
    """A model, its optimizer, and one line for each thing to do."""

    def __init__(self):
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001)

    def train(self, loader):
        self.model.train()
        for (x,) in loader:
            self.model(x).square().mean().backward()
            self.optimizer.step()

    def read(self, loader):
        for _ in loader:
            pass


def rows_of(run, tmp_path):
    """The rows of the report of ``run``, by call, on rank 0; and the warnings."""
    report = tmp_path / "report.json"
    with parwrap.distributed(), parwrap.explain(report=str(report)):
        run()
    if parwrap.rank() > 0:
        return None, None
    told = json.loads(report.read_text())
    return told["rows"], told["warnings"]


@pytest.mark.ranks(2)
def test_a_row_has_the_seconds_that_its_line_took(tmp_path):
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            time.sleep(0.05)
            return (torch.ones(1),)

    rows, _ = rows_of(lambda: Loop().train(DataLoader(Slow(), batch_size=2)), tmp_path)

    if parwrap.rank() == 0:
        read, backward, step = (row["seconds"] for row in rows)
        assert 0.1 <= read
        assert 0 < backward
        assert 0 == step


@pytest.mark.ranks(2)
def test_each_line_of_a_loop_has_a_row_in_the_order_of_the_script(tmp_path, capfd):
    def run():
        loop, loader = Loop(), DataLoader(data(), batch_size=3, shuffle=True)
        for _ in range(2):
            loop.train(loader)
        torch.save(loop.model.state_dict(), tmp_path / "model.pt")

    rows, said = rows_of(run, tmp_path)

    if parwrap.rank() == 0:
        assert [] == said
        assert ["DataLoader", "backward", "SGD.step", "torch.save"] == [row["call"] for row in rows]
        assert [2, 4, 4, 1] == [row["times"] for row in rows]
        assert "each of 2 ranks 6 of 12 samples, RandomSampler, 2 passes, 4 batches" == rows[0]["what"]
        assert re.fullmatch(r"averaged 2 parameters, 8e-06 MB, 4 times, \d+% of the time waiting for averages", rows[1]["what"])
        assert ["2, 4: trains", "5", "1", "8"] == [row["rule"] for row in rows]
        assert "rank 0 writes model.pt" == rows[3]["what"]
        text = capfd.readouterr().err
        assert re.search(
            r"(?m)^parwrap explains:\nline +call +what parwrap did +by rule +what changes it\ntest_explain.py:\d+ +DataLoader +each", text
        )


@pytest.mark.ranks(2)
def test_zipped_loaders_have_the_batches_of_both_and_what_stays_in_memory_is_no_file(tmp_path):
    def run():
        loop, one, other = Loop(), DataLoader(data(), batch_size=3, shuffle=True), DataLoader(data(), batch_size=3, shuffle=True)
        for _ in range(2):
            for (x,), (y,) in zip(one, other, strict=True):
                loop.model(x + y).square().mean().backward()
                loop.optimizer.step()
        parwrap.gather(x)
        torch.save(x, io.BytesIO())

    rows, _ = rows_of(run, tmp_path)

    if parwrap.rank() == 0:
        assert ["DataLoader", "backward", "SGD.step"] == [row["call"] for row in rows]
        assert "each of 2 ranks 6 of 12 samples, RandomSampler, 4 passes, 8 batches" == rows[0]["what"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("no gradients", "2: gradients are off"),
        ("eval", r"2: the model is in eval mode since test_explain.py:\d+"),
        ("no optimizer", "2: no optimizer has been built"),
        ("replicated", "2: parwrap.replicate"),
    ],
)
def test_a_whole_pass_says_why_it_is_whole(kind, rule, tmp_path):
    def run():
        loader, loop = DataLoader(data(), batch_size=3), None if kind == "no optimizer" else Loop()
        if kind == "eval":
            loop.model.eval()
        if kind == "replicated":
            parwrap.replicate(loader)
        with torch.set_grad_enabled(kind != "no gradients"):
            Loop.read(loop, loader)

    rows, _ = rows_of(run, tmp_path)

    if parwrap.rank() == 0:
        assert ("all samples on every rank, SequentialSampler, 1 pass, 4 batches", True) == (
            rows[0]["what"],
            bool(re.fullmatch(rule, rows[0]["rule"])),
        )


@pytest.mark.ranks(2)
def test_what_the_script_said_and_what_was_warned_of_is_there(tmp_path):
    def run():
        loop, loader = Loop(), parwrap.shard(DataLoader(data(), batch_size=3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loop.read(DataLoader(data(), batch_size=3))  # no step follows
        loop.train(loader)

    rows, said = rows_of(run, tmp_path)

    if parwrap.rank() == 0:
        idle = next(row for row in rows if row["what"].endswith("1 pass, 2 batches, no optimizer has stepped"))
        assert "2, 4: trains" == idle["rule"]
        assert "2, 4: parwrap.shard" in [row["rule"] for row in rows if row["call"] == "DataLoader"]
        assert (1, True) == (len(said), "no optimizer stepped" in said[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("strategy", "verb"), [("zero1", "averaged"), ("hogwild", "this rank's gradients of")])
def test_a_backward_says_what_its_strategy_does(strategy, verb, tmp_path):
    report = tmp_path / "report.json"
    with parwrap.distributed(strategy=strategy), parwrap.explain(report=str(report)):
        Loop().train(DataLoader(data(), batch_size=3))

    if parwrap.rank() == 0:
        row = next(row for row in json.loads(report.read_text())["rows"] if row["call"] == "backward")
        assert (True, f"5, strategy={strategy!r}") == (row["what"].startswith(verb), row["rule"])


@pytest.mark.ranks(2)
def test_a_loop_that_steps_by_hand_may_be_sharded(tmp_path):
    def run():
        model = nn.Linear(1, 1)
        for (x,) in DataLoader(data(), batch_size=3):
            model(x).sum().backward()

    rows, _ = rows_of(run, tmp_path)

    if parwrap.rank() == 0:
        assert "shard(loader)" == rows[0]["change"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "averaged"),
    [("another optimizer", "1 parameter, 8e-06 MB"), ("no optimizer", "1 parameter, 8e-06 MB"), ("sparse", "1 parameter, 1.6e-05 MB")],
)
def test_a_backward_counts_the_gradients_that_it_changes(kind, averaged, tmp_path):
    def run():
        model = nn.Embedding(5, 2, sparse=True)
        weight = model.weight if kind == "sparse" else nn.Parameter(torch.ones(2))
        optimizer = None if kind == "no optimizer" else torch.optim.SGD([weight], lr=0.1)
        if kind == "another optimizer":
            other = Loop()
            other.train(DataLoader(data(), batch_size=3))  # its gradients stay
        loss = model(torch.tensor([0, 3])) if kind == "sparse" else weight
        loss.sum().backward()
        if optimizer is not None:
            optimizer.step()

    rows, _ = rows_of(run, tmp_path)

    if parwrap.rank() == 0:
        assert f"averaged {averaged}, 1 times" == [row["what"] for row in rows if row["call"] == "backward"][-1]


PHASES = """import sys, torch; sys.path.append("site-packages")
from torch.utils.data import DataLoader, TensorDataset
from fitting import Metric, fit; from meters import Meter
data = {phase: DataLoader(TensorDataset(torch.randn(n, 1)), batch_size=4, shuffle=True) for phase, n in (("train", 32), ("val", 12))}
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    for phase in data:
        model.train(phase == "train")
        above = total = steps = 0; meter, metric = Meter(), Metric()
        for (x,) in data[phase]:
            with torch.set_grad_enabled(phase == "train"):
                loss = model(x).square().mean()
                if phase == "train":
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            above += (x > 0).sum().item(); meter.update(x.mean().item()); metric.update(x)
            total += loss.item()
            steps += 1
        print(above, total / steps, meter.sum, metric.sum)
fit(model, optimizer, data["train"])
fit(model, torch.optim.SGD(model.parameters(), lr=0.1), data["train"])
"""
EVALUATE = "@evaluate shares it, exactly"
METER = """class {}:
    sum = 0
    def update(self, value):
        self.sum += value
"""
FITTING = """import torch
def fit(model, optimizer, loader):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        for (x,) in loader:
            model(x)
"""


def test_each_loop_and_kind_of_pass_has_a_row_and_what_a_training_loop_adds_up_is_listed(tmp_path, warm_python):
    (tmp_path / "train.py").write_text(PHASES)
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "fitting.py").write_text(FITTING + METER.format("Metric"))
    (tmp_path / "meters.py").write_text(METER.format("Meter"))

    run = warm_python.run("parwrap", "explain", "--nproc-per-node", "2", "--report", "report.json", "train.py", cwd=tmp_path)

    told = json.loads((tmp_path / "report.json").read_text())
    rows = [row for row in told["rows"] if row["call"].startswith("DataLoader")]
    assert [
        ("train.py:11", "DataLoader", "each of 2 ranks 16 of 32 samples, RandomSampler, 2 passes, 8 batches"),
        ("train.py:11", "DataLoader", "all samples on every rank, RandomSampler, 2 passes, 6 batches"),
        ("train.py:22", "DataLoader in fitting.py:3", "all samples on every rank, RandomSampler, 1 pass, 8 batches"),
        ("train.py:22", "DataLoader in fitting.py:8", "all samples on every rank, RandomSampler, 1 pass, 8 batches"),
        ("train.py:23", "DataLoader in fitting.py:3", "each of 2 ranks 16 of 32 samples, RandomSampler, 1 pass, 4 batches"),
        ("train.py:23", "DataLoader in fitting.py:8", "all samples on every rank, RandomSampler, 1 pass, 8 batches"),
    ] == [(row["place"], row["call"], row["what"]) for row in rows], run.stderr
    assert [
        ("2, 4: trains", "replicate(loader)"),
        ("2: the model is in eval mode since train.py:9; later no optimizer stepped in this loop the last time", EVALUATE),
        ("2: another loop has trained since the optimizer was built", "shard(loader)"),  # it trains, whole
        ("2: gradients are off", EVALUATE),
        ("2, 4: trains", "replicate(loader)"),
        ("2: gradients are off", EVALUATE),
    ] == [(row["rule"], row["change"]) for row in rows]
    assert [{"place": "train.py:18", "name": name} for name in ("above", "meter")] == told["added_up"], (
        "a library's metric may know all ranks"
    )
    assert "`parwrap.total(..., of=loader)` adds up over all ranks:\n  train.py:18  above\n" in run.stderr


def test_on_one_rank_there_is_nothing_to_explain(capfd):
    with parwrap.explain():
        Loop().train(DataLoader(data(), batch_size=3))

    assert (
        "parwrap: one rank runs, so it reads, trains and writes as without parwrap, and there is nothing to explain: start several, as "
        "with --nproc-per-node 2\n"
    ) == capfd.readouterr().err


def test_a_report_in_a_missing_folder_is_refused():
    with pytest.raises(parwrap.UsageError, match=r"report='nowhere/x\.json' is in a folder that does not exist: make the folder first"):
        parwrap.explain(report="nowhere/x.json")
    with pytest.raises(parwrap.UsageError, match=r"html='nowhere/x\.html' is in a folder that does not exist: make the folder first"):
        parwrap.explain(html="nowhere/x.html")


def test_a_report_is_beside_where_the_script_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    watched = parwrap.explain(report="report.json")
    (tmp_path / "inner").mkdir()
    os.chdir("inner")

    assert watched._report == str(tmp_path / "report.json")


def test_a_page_has_the_lines_of_all_files_and_what_each_did_and_said(tmp_path, warm_python):
    loop = SCRIPT.partition("open(")[0].partition("for x")
    (tmp_path / "train.py").write_text(f"{loop[0]}import a_helper\na_helper.fit(model, optimizer)\nprint('<i>', 3, sep='&')\n")
    (tmp_path / "a_helper.py").write_text(
        "import torch\ndef fit(model, optimizer):\n    total = 0\n    "
        + (loop[1] + loop[2]).replace("\n", "\n    ")
        + "    total += len(x)\n"
        "    return total\n"
    )

    command = ["parwrap", "explain", "--nproc-per-node", "2", "--html", "page.html", "train.py"]
    run = warm_python.run(*command, cwd=tmp_path)
    text = (tmp_path / "page.html").read_text()

    assert (0, "<i>&3\n") == (run.returncode, run.stdout)
    assert text.index(">What parwrap did to train.py on 2 ranks<") < text.index("<h2>train.py<") < text.index("<h2>a_helper.py<")
    assert "<pre>&lt;i&gt;&amp;3</pre>" in text
    assert "<i>" not in text
    line = next(line for line in text.splitlines() if "for x in torch" in line)
    assert '<div class="note share"><b>DataLoader</b> each of 2 ranks 4 of 8 samples, SequentialSampler, 1 pass, 2 batches<' in line
    assert re.search(r"rule 2, 4: trains; what changes it: replicate\(loader\); [\d.e-]+ s on rank 0<", line)
    assert "<b>adds up total:</b> each rank has the sum over its own samples (rule 7)<" in text


def test_a_page_folds_long_stretches_without_a_note_and_escapes_everything(tmp_path):
    file = tmp_path / "<b>.py"
    file.write_text("x = '<u>'\n" * 100)
    text = page([Note(Place(str(file), 50), "warning", "<b>", "<b>", "<b>", "<b>")], str(file), 2)

    assert ["lines 1 to 43", "lines 57 to 100"] == re.findall(r"<summary>(.*?)</summary>", text)
    assert list(range(1, 101)) == [int(number) for number in re.findall(r'<span class="number">(\d+)<', text)]
    assert [] == re.findall(r"<u>|<b>(?!&lt;b&gt;</b>)", text)


def test_a_page_of_a_file_that_cannot_be_read_has_its_notes():
    text = page([Note(Place("gone.py", 2), "other", "print", "rank 0 speaks")], "", 2)

    assert "What parwrap did to gone.py on 2 ranks" in text
    assert "<b>print</b> rank 0 speaks" in text


def test_a_report_that_is_no_path_is_refused():
    with pytest.raises(parwrap.UsageError, match=r"report=3 is not the path of a file\."):
        parwrap.explain(report=3)


SCRIPT = """import torch
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.utils.data.DataLoader(torch.rand(8, 1), batch_size=2):
    model(x).sum().backward()
    optimizer.step()
open('log.txt', 'w').write('x')
print('done')
"""


def test_a_script_is_explained_by_the_command(tmp_path, warm_python):
    (tmp_path / "train.py").write_text(SCRIPT)

    run = warm_python.run("parwrap", "explain", "--nproc-per-node", "2", "--report", "report.json", "train.py", cwd=tmp_path)

    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert (0, "done\n", [f"train.py:{line}" for line in range(4, 9)]) == (run.returncode, run.stdout, [row["place"] for row in rows])
    assert ["rank 0 writes log.txt", "rank 0 speaks"] == [row["what"] for row in rows[3:]]
    assert "train.py:4  DataLoader  each of 2 ranks 4 of 8 samples, SequentialSampler" in run.stderr


@pytest.mark.slow
def test_on_a_terminal_the_cells_of_the_table_wrap(tmp_path, warm_python):
    text = shown(warm_python, SCRIPT, tmp_path, "explain", "--nproc-per-node", "2", columns=100)
    lines = text.replace("\r", "").partition("parwrap explains")[2].partition("└")[0].splitlines()

    assert all(len(line) <= 100 for line in lines if line.startswith("│"))
    assert ["train.py:4", "DataLoader"] == [cell.strip() for cell in _row(lines, "train.py:4")[:2]]
    wrapped = _column(lines, "train.py:4", 2)
    assert len(wrapped) > 1  # where it wraps depends on times in other rows
    assert "each of 2 ranks 4 of 8 samples, SequentialSampler, 1 pass, 2 batches".replace(" ", "") == "".join(wrapped).replace(" ", "")


def _row(lines, first):
    return next(cells for line in lines if (cells := re.split("[│┃]", line)[1:]) and cells[0].strip() == first)


def _column(lines, first, number):
    """The parts of a cell that is wrapped."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines if line.startswith(("│", "┃"))]
    start = next(index for index, row in enumerate(rows) if row[0] == first)
    end = next(index for index in range(start + 1, len(rows)) if rows[index][0])
    return [row[number] for row in rows[start:end] if row[number]]
