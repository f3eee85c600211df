"""nn.DataParallel over the GPUs that the author's machine had."""

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 4 * 4, 2)

    def forward(self, x):
        x = torch.max_pool2d(torch.relu(self.bn(self.conv(x))), 2)
        return self.fc(x.flatten(1))


def make_images(n):
    """Bars that lie or stand."""
    labels = torch.randint(2, (n,))
    images = 0.3 * torch.randn(n, 1, 8, 8)
    for image, label, place in zip(images, labels, torch.randint(8, (n,))):
        if label:
            image[0, place] += 1
        else:
            image[0, :, place] += 1
    return TensorDataset(images, labels)


torch.manual_seed(0)
trainloader = DataLoader(make_images(400), batch_size=20, shuffle=True)
testloader = DataLoader(make_images(200), batch_size=50, shuffle=False)
model = nn.DataParallel(Net(), device_ids=[0, 1], output_device=0).to(device)
optimizer = optim.Adam(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

best_acc = 0
for epoch in range(3):
    model.train()
    for inputs, targets in trainloader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for inputs, targets in testloader:
            correct += (model(inputs.to(device)).argmax(1) == targets.to(device)).sum().item()
    acc = correct / len(testloader.dataset)
    print(f"Epoch {epoch}: {acc:.3f}")
    if acc > best_acc:
        torch.save({"net": model.state_dict(), "acc": acc}, "ckpt.pth")
        best_acc = acc

checkpoint = torch.load("ckpt.pth")
assert all(key.startswith("module.") for key in checkpoint["net"])
model.load_state_dict(checkpoint["net"])
print(f"accuracy {checkpoint['acc']:.4f}")
