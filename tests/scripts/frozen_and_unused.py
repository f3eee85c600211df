"""Transfer learning: a frozen backbone kept in eval(), a new head, and a head that is never used."""

import math

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(2, 128), nn.BatchNorm1d(128), nn.ReLU())
        self.fc = nn.Linear(128, 3)
        self.aux_fc = nn.Linear(128, 10)

    def forward(self, x):
        return self.fc(self.backbone(x))


def set_parameter_requires_grad(module, feature_extracting):
    if feature_extracting:
        for param in module.parameters():
            param.requires_grad = False


def three_rings(count):
    labels = torch.arange(count) % 3
    radius = 1.0 + labels + 0.15 * torch.randn(count)
    angle = 2 * math.pi * torch.rand(count)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), labels)


def train_model(model, dataloaders, criterion, optimizer, num_epochs):
    for epoch in range(num_epochs):
        print(f"Epoch {epoch}/{num_epochs - 1}")
        for phase in ["train", "val"]:
            if phase == "train":
                model.train()
                model.backbone.eval()  # keep its batch norm statistics
            else:
                model.eval()

            running_loss, running_corrects, seen = 0.0, 0, 0
            for inputs, labels in dataloaders[phase]:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    loss = criterion(outputs, labels)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running_loss += loss.item() * inputs.size(0)
                running_corrects += torch.sum(outputs.argmax(1) == labels).item()
                seen += inputs.size(0)
            print(f"{phase} Loss: {running_loss / seen:.4f} Acc: {running_corrects / seen:.4f}")
    return running_corrects / seen


if __name__ == "__main__":
    torch.manual_seed(0)
    dataloaders = {
        "train": DataLoader(three_rings(640), batch_size=32, shuffle=True),
        "val": DataLoader(three_rings(300), batch_size=32, shuffle=False),
    }
    model = Net()
    set_parameter_requires_grad(model.backbone, feature_extracting=True)
    params_to_update = [param for param in model.parameters() if param.requires_grad]
    # With weight decay the unused head keeps its weights only while its gradients stay None.
    optimizer = optim.AdamW(params_to_update, lr=0.02, weight_decay=0.05)
    accuracy = train_model(model, dataloaders, nn.CrossEntropyLoss(), optimizer, num_epochs=3)
    print(f"accuracy {accuracy:.4f}")
