"""Code as a user writes it who has mypy check strictly: every decorator bare, called, stacked, on methods and as a block."""

import torch

import parwrap


@parwrap.distributed
def bare(epochs: int) -> float:
    return epochs / 2


@parwrap.distributed(seed=1, batch="global", timeout=60)
def called(epochs: int) -> float:
    return epochs / 2


@parwrap.distributed
@parwrap.amp("fp16")
@parwrap.amp(dtype=torch.bfloat16, device="cpu")
@parwrap.accumulate(4)
@parwrap.accumulate("auto")
@parwrap.accumulate(steps=2)
@parwrap.sync_bn(group_size=2)
@parwrap.sync_bn
@parwrap.uniform_length(multiple_of=8)
@parwrap.uniform_length
def stacked(epochs: int) -> float:
    return epochs / 2


@parwrap.evaluate(reduce="sum")
def evaluated(model: torch.nn.Module) -> float:
    return 0.5


@parwrap.data_parallel(device_ids=["cpu"], gather=False)
@parwrap.hogwild(workers=2)
def older(epochs: int) -> None:
    return None


class Trainer(parwrap.DistributedMixin, parwrap.AmpMixin):
    @parwrap.amp
    def train(self, epochs: int) -> float:
        return epochs / 2

    @parwrap.evaluate
    def validate(self) -> float:
        return 0.5

    @staticmethod
    @parwrap.rank_zero_only(broadcast=True)
    def download() -> str:
        return "data"

    @classmethod
    @parwrap.every_rank_writes
    def write(cls) -> None:
        return None


def blocks() -> None:
    with parwrap.distributed(nprocs=None), parwrap.amp("auto"), parwrap.accumulate(2), parwrap.sync_bn():
        pass
    with parwrap.rank_zero_first(local=True), parwrap.every_rank_writes():
        pass


def calls() -> tuple[float, str]:
    older(1)
    half = bare(1) + called(1) + stacked(epochs=1) + evaluated(torch.nn.Linear(1, 1))
    return half + Trainer().train(2) + Trainer().validate(), Trainer.download()
