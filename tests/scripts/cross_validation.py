"""3-fold cross-validation with sklearn's KFold and SubsetRandomSampler: a fresh model for every fold."""

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import make_classification
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

k_folds = 3
num_epochs = 2


def reset_weights(m):
    """Avoid weight leakage between folds."""
    for layer in m.children():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()


if __name__ == "__main__":
    torch.manual_seed(42)
    np.random.seed(42)
    X, y = make_classification(n_samples=360, n_features=10, n_informative=6, class_sep=2.0, random_state=1)
    dataset = TensorDataset(torch.tensor(X, dtype=torch.float32), torch.tensor(y))

    kfold = KFold(n_splits=k_folds, shuffle=True)
    results = {}
    for fold, (train_ids, test_ids) in enumerate(kfold.split(dataset)):
        print(f"FOLD {fold}\n--------------------------------")
        trainloader = DataLoader(dataset, batch_size=20, sampler=SubsetRandomSampler(train_ids))
        testloader = DataLoader(dataset, batch_size=10, sampler=SubsetRandomSampler(test_ids))

        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
        model.apply(reset_weights)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loss_function = nn.CrossEntropyLoss()

        for epoch in range(num_epochs):
            for inputs, targets in trainloader:
                optimizer.zero_grad()
                loss = loss_function(model(inputs), targets)
                loss.backward()
                optimizer.step()
        torch.save(model.state_dict(), f"./model-fold-{fold}.pth")

        correct, total = 0, 0
        with torch.no_grad():
            for inputs, targets in testloader:
                predicted = model(inputs).argmax(dim=1)
                total += targets.size(0)
                correct += (predicted == targets).sum().item()
        assert total == len(test_ids)
        results[fold] = correct / total
        print(f"Accuracy for fold {fold}: {100 * results[fold]:.1f} %")

    print(f"accuracy {sum(results.values()) / len(results):.4f}")
