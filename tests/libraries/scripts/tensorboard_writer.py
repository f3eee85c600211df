import json

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

torch.manual_seed(0)
x = torch.randn(64, 4)
y = (x.sum(1) > 0).long()
train, val = DataLoader(TensorDataset(x[:48], y[:48]), 8, shuffle=True), DataLoader(TensorDataset(x[48:], y[48:]), 8)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
writer = SummaryWriter("runs")
writer.add_graph(model, x[:8])
for epoch in range(3):
    model.train()
    read = total = right = 0
    for inputs, labels in train:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        read += len(inputs)
        total += loss.item()
    model.eval()
    with torch.no_grad():
        for inputs, labels in val:
            right += (model(inputs).argmax(1) == labels).sum().item()
    writer.add_scalar("train/loss", total / len(train), epoch)
    writer.add_scalar("val/accuracy", right / len(val.dataset), epoch)
    writer.add_histogram("weight", model.weight, epoch)
    print("RESULT", json.dumps({"read": read}))
writer.add_hparams({"lr": 0.1}, {"accuracy": right / len(val.dataset)}, run_name="hparams")
writer.close()
events = EventAccumulator("runs").Reload()
print("RESULT", json.dumps({tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
torch.save(model.state_dict(), "final.pt")
