"""A network that knows the digits 0 to 4 learns 5 to 9: the loop of PyTorch's transfer learning tutorial, with what parwrap adds.

python examples/transfer_learning.py
parwrap run --nproc-per-node 2 --batch global examples/transfer_learning.py
"""

import os
from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split

import parwrap


def digits(known):
    """The images of the digits 0 to 4, or of 5 to 9, in sets for training and validation."""
    images, labels = load_digits(return_X_y=True)
    chosen = (labels < 5) == known
    images = torch.tensor(images[chosen], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    dataset = TensorDataset(images, torch.tensor(labels[chosen] % 5))
    train, val = random_split(dataset, [0.8, 0.2])
    return {"train": train, "val": val}


def train_model(model, criterion, optimizer, scheduler, datasets, num_epochs):
    dataloaders = {phase: DataLoader(datasets[phase], batch_size=32, shuffle=phase == "train") for phase in datasets}
    with TemporaryDirectory() as tempdir:
        best_model_params_path = os.path.join(tempdir, "best_model_params.pt")
        torch.save(model.state_dict(), best_model_params_path)
        best_acc = 0.0

        for epoch in range(num_epochs):
            for phase in ["train", "val"]:
                if phase == "train":
                    model.train()
                else:
                    model.eval()
                running_loss = 0.0
                running_corrects = 0

                for inputs, labels in dataloaders[phase]:
                    optimizer.zero_grad()
                    with torch.set_grad_enabled(phase == "train"):
                        outputs = model(inputs)
                        _, preds = torch.max(outputs, 1)
                        loss = criterion(outputs, labels)
                        if phase == "train":
                            loss.backward()
                            optimizer.step()
                    running_loss += loss.item() * inputs.size(0)
                    running_corrects += torch.sum(preds == labels).item()
                if phase == "train":
                    scheduler.step()

                of = dataloaders[phase]
                running_loss, running_corrects = parwrap.total((running_loss, running_corrects), of=of)  # added
                epoch_loss = running_loss / len(datasets[phase])
                epoch_acc = running_corrects / len(datasets[phase])
                print(f"epoch {epoch + 1} {phase} loss: {epoch_loss:.4f} acc: {epoch_acc:.4f}")
                if phase == "val" and epoch_acc > best_acc:
                    best_acc = epoch_acc
                    torch.save(model.state_dict(), best_model_params_path)

        model.load_state_dict(torch.load(best_model_params_path))
    return model


@parwrap.evaluate(reduce="sum")  # added: each rank evaluates a part
def count_correct(model, loader):
    model.eval()
    with torch.no_grad():
        return sum((model(inputs).argmax(1) == labels).sum().item() for inputs, labels in loader)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 5)),
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_model(model, criterion, optimizer, optim.lr_scheduler.StepLR(optimizer, 7), digits(known=True), num_epochs=2)

    for param in model.parameters():
        param.requires_grad = False
    model[-1] = nn.Linear(512, 5)  # the new layer has gradients
    optimizer = optim.SGD(model[-1].parameters(), lr=0.05, momentum=0.9)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    datasets = digits(known=False)
    train_model(model, criterion, optimizer, scheduler, datasets, num_epochs=3)
    correct = count_correct(model, DataLoader(datasets["val"], batch_size=64))
    print(f"best accuracy on the digits 5 to 9: {correct / len(datasets['val']):.4f}")


if __name__ == "__main__":
    main()
