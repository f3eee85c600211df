"""tqdm bars around the loaders, with a postfix."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

torch.manual_seed(0)
EPOCHS = 3
BATCH_SIZE = 25

inputs = torch.rand(800, 5)
labels = (inputs[:, :2].sum(1, keepdim=True) > inputs[:, 2:4].sum(1, keepdim=True)).float()
train_loader = DataLoader(TensorDataset(inputs[:500], labels[:500]), batch_size=BATCH_SIZE, shuffle=True)
val_loader = DataLoader(TensorDataset(inputs[500:], labels[500:]), batch_size=BATCH_SIZE)
model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
bce = nn.BCEWithLogitsLoss()

for epoch in range(EPOCHS):
    model.train()
    with tqdm(train_loader, unit="batch") as tepoch:
        for data, target in tepoch:
            tepoch.set_description(f"Epoch {epoch}")
            optimizer.zero_grad()
            loss = bce(model(data), target)
            loss.backward()
            optimizer.step()
            tepoch.set_postfix(loss=loss.item())
    tqdm.write(f"epoch {epoch} finished")

model.eval()
correct = 0
with torch.no_grad():
    for data, target in tqdm(val_loader, desc="Validating", leave=False):
        correct += ((model(data) > 0).float() == target).sum().item()
print("accuracy", correct / len(val_loader.dataset))
