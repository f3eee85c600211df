import json
import logging
from dataclasses import dataclass
from pathlib import Path

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.utils import get_original_cwd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    lr: float = 0.1
    epochs: int = 3


ConfigStore.instance().store("config", Config)
log = logging.getLogger(__name__)


@hydra.main(version_base=None, config_path=None, config_name="config")
def main(config):
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = (x.sum(1) > 0).long()
    train, val = DataLoader(TensorDataset(x[:48], y[:48]), 8, shuffle=True), DataLoader(TensorDataset(x[48:], y[48:]), 8)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), config.lr)
    for epoch in range(config.epochs):
        model.train()
        read = right = 0
        for inputs, labels in train:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            read += len(inputs)
        model.eval()
        with torch.no_grad():
            for inputs, labels in val:
                right += (model(inputs).argmax(1) == labels).sum().item()
        log.info("epoch %d right %d", epoch, right)
        torch.save(model.state_dict(), f"epoch{epoch}.pt")  # in the directory of this job
        print("RESULT", json.dumps({"read": read, "right": right, "loss": loss.item(), "lr": config.lr, "cwd": Path.cwd().name}))
    torch.save(model.state_dict(), Path(get_original_cwd(), "final.pt"))


if __name__ == "__main__":
    main()
