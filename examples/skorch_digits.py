"""A classifier of skorch, fitted as scikit-learn's are, in a script that has never heard of ranks.

python examples/skorch_digits.py
parwrap run --nproc-per-node 2 --batch global examples/skorch_digits.py
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from skorch import NeuralNetClassifier
from torch import nn


def main():
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(images.astype("float32") / 16, labels, random_state=0)
    net = NeuralNetClassifier(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=0.01,
        max_epochs=5,
        batch_size=32,
        iterator_train__shuffle=True,
    )
    net.fit(x, y)
    print(f"test accuracy {net.score(x_test, y_test):.4f}")


if __name__ == "__main__":
    main()
