"""Libraries that write files by themselves: each file is written once, whole, and by rank 0."""

import os
import threading
import time

import pytest
import torch

from parwrap.rank_zero.files import intercepting_files
from parwrap.ranks.collectives import barrier, gather
from parwrap.ranks.group import current, rank


def late(slow):
    """The rank ``slow`` is slower here than the others."""
    if rank() == slow:
        time.sleep(0.1)


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.ranks(2)
def test_a_figure_is_rank_zeros(slow, tmp_path):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    path = tmp_path / "figures" / "loss.png"
    with intercepting_files(current()):
        path.parent.mkdir()
        late(slow)
        plt.imshow(torch.full((2, 2), rank()), vmin=0, vmax=1)
        plt.axis("off")
        plt.savefig(path)
        plt.savefig(tmp_path / "loss.pdf")
        image = plt.imread(path)

    middle = tuple(image[image.shape[0] // 2, image.shape[1] // 2][:3].tolist())
    everybody = gather(middle)

    assert pytest.approx(plt.get_cmap("viridis")(1.0)[:3], abs=0.01) == everybody[1], "what it drew itself"
    middle = everybody[0]
    assert middle == pytest.approx(plt.get_cmap("viridis")(0.0)[:3], abs=0.01)
    assert ["figures", "loss.pdf"] == sorted(os.listdir(tmp_path))
    assert (tmp_path / "loss.pdf").read_bytes().rstrip().endswith(b"%%EOF")


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.ranks(2, fresh=True)  # TensorBoard leaves an import hook
def test_a_summary_writer_writes_each_number_once(slow, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    before = set(threading.enumerate())
    with intercepting_files(current()):
        writer = SummaryWriter(tmp_path / "runs" / "first", flush_secs=1)
        for step in range(50):
            late(slow) if step == 10 else None
            writer.add_scalar("loss", step + 1000 * rank(), step)
        writer.add_text("note", "hello")
        writer.flush()
        writer.add_histogram("weights", torch.arange(10), 0)
        writer.close()
    barrier()

    (name,) = os.listdir(tmp_path / "runs" / "first")
    events = EventAccumulator(str(tmp_path / "runs" / "first"))
    events.Reload()
    assert [(step, float(step)) for step in range(50)] == [(event.step, event.value) for event in events.Scalars("loss")]
    assert ["weights"] == events.Tags()["histograms"]
    assert f".{gather(os.getpid())[0]}." in name
    assert before == set(threading.enumerate())


@pytest.mark.ranks(3)
def test_a_data_frame_is_rank_zeros(tmp_path):
    import pandas

    with intercepting_files(current()):
        late(0)
        pandas.DataFrame({"loss": [rank(), 2]}).to_csv(tmp_path / "log.csv", index=False)
        pandas.DataFrame({"loss": [3]}).to_csv(tmp_path / "log.csv", index=False, mode="a", header=False)

        assert [rank(), 2, 3] == pandas.read_csv(tmp_path / "log.csv")["loss"].tolist()
    barrier()

    assert "loss\n0\n2\n3\n" == (tmp_path / "log.csv").read_text()
