import json
import sys

import torch
from pytorch_metric_learning import distances, losses, trainers
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 6)
y = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
read = 0


class Counted(TensorDataset):
    def __getitem__(self, index):
        global read
        read += 1
        return super().__getitem__(index)


network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
calculator = AccuracyCalculator(include=("precision_at_1",), k=1, knn_func=CustomKNN(distances.CosineSimilarity()))


def report(**numbers):
    global read
    network.eval()
    with torch.no_grad():
        embeddings = network(x[64:])
    print("RESULT", json.dumps({"read": read, **numbers, **calculator.get_accuracy(embeddings, y[64:])}))
    read = 0


train = Counted(x[:64], y[:64])
loss_fn = losses.ArcFaceLoss(num_classes=4, embedding_size=4)
if sys.argv[1:] == ["trainer"]:
    optimizers = {
        "trunk_optimizer": torch.optim.SGD(network.parameters(), 0.05),
        "metric_loss_optimizer": torch.optim.SGD(loss_fn.parameters(), 0.05),
    }
    trainer = trainers.MetricLossOnly(
        {"trunk": network}, optimizers, batch_size=16, loss_funcs={"metric_loss": loss_fn}, dataset=train, dataloader_num_workers=0,
        end_of_epoch_hook=lambda trainer: report(),
    )
    trainer.train(num_epochs=4)
else:
    optimizer = torch.optim.SGD([*network.parameters(), *loss_fn.parameters()], 0.05)
    loader = DataLoader(train, batch_size=16, shuffle=True)
    for epoch in range(4):
        network.train()
        total = 0
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(network(inputs), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        report(loss=total / len(loader))
torch.save({**network.state_dict(), **loss_fn.state_dict()}, "final.pt")
