import json

import torch
from pytorch_accelerated import Trainer
from pytorch_accelerated.trainer import DEFAULT_CALLBACKS
from pytorch_accelerated.callbacks import EarlyStoppingCallback, SaveBestModelCallback, TrainerCallback
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 6)
y = (x.sum(1) > 0).long()
read = 0


class Counted(TensorDataset):
    def __getitem__(self, index):
        global read
        read += 1
        return super().__getitem__(index)


class Report(TrainerCallback):
    def on_training_run_epoch_end(self, trainer, **kwargs):
        global read
        history = trainer.run_history
        names = ("eval_loss_epoch",)  # its training loss is of this share: it copies the loss before the backward
        print("RESULT", json.dumps({"read": read, **{name: float(history.get_latest_metric(name)) for name in names}}))
        read = 0


model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.2)
callbacks = [ EarlyStoppingCallback(early_stopping_patience=3), SaveBestModelCallback("best.pt")]
trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=[*DEFAULT_CALLBACKS, *callbacks, Report()])
held_out = TensorDataset(x[64:], y[64:])
loaders = {"train_dataloader_kwargs": {"num_workers": 0}, "eval_dataloader_kwargs": {"num_workers": 0}}
trainer.train(Counted(x[:64], y[:64]), num_epochs=4, eval_dataset=held_out, per_device_batch_size=8, **loaders)
torch.save(trainer.get_model().state_dict(), "final.pt")
