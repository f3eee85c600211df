"""Code as users write it who have mypy check strictly: every decorator bare, called, stacked, on methods and as a block."""

import torch
from typing_extensions import reveal_type

import parwrap


@parwrap.distributed
def bare(epochs: int) -> float:
    return epochs / 2


@parwrap.distributed(seed=1, batch="global", timeout=60, nprocs=2)
@parwrap.amp("fp16")
@parwrap.amp(dtype=torch.bfloat16, device="cpu")
@parwrap.accumulate(4)
@parwrap.accumulate(steps=2)
def stacked(epochs: int) -> float:
    return epochs / 2


class Trainer(parwrap.DistributedMixin, parwrap.AmpMixin, batch="global"):
    @parwrap.amp
    def train(self, epochs: int) -> float:
        return epochs / 2

    @staticmethod
    @parwrap.rank_zero_only(broadcast=True)
    def download() -> str:
        return "data"

    @classmethod
    @parwrap.every_rank_writes
    def write(cls) -> None:
        return None


def blocks() -> None:
    with parwrap.distributed(nprocs=None), parwrap.amp("auto"), parwrap.accumulate(2), parwrap.same_draws(), parwrap.no_sync():
        pass
    with parwrap.rank_zero_first(local=True), parwrap.every_rank_writes():
        pass


def never_called() -> None:
    reveal_type(bare)  # "def (epochs: int) -> float"
    reveal_type(stacked)  # "def (epochs: int) -> float"
    reveal_type(Trainer().train)  # "def (epochs: int) -> float"
    reveal_type(Trainer.download())  # "str"
    parwrap.distributed(sead=1)  # error: Unexpected keyword argument "sead"
    parwrap.distributed(seed="1")  # int | None
    parwrap.distributed(batch="globe")  # Literal['per_rank', 'global', 'whole']
    parwrap.launch(bare, 3, nprocs="gpus")  # Literal['gpu', 'cpu', 'auto']
    reveal_type(parwrap.launch(bare, 3, nprocs=2))  # "float"
    reveal_type(parwrap.reduce_sum({"loss": 0.5}))  # "dict[str, float]"
