import json

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, index):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


if __name__ == "__main__":
    L.seed_everything(0)
    x = torch.randn(64, 4)
    model = Model()
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", enable_progress_bar=False, logger=False, enable_checkpointing=False
    )
    trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8))
    if trainer.is_global_zero:
        print("RESULT", json.dumps({"size": trainer.world_size, "steps": trainer.global_step}))
        torch.save(model.state_dict(), "final.pt")
