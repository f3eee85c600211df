"""No nn.Module at all: bare tensors that require grad, and a hand-written SGD."""

import torch
from torch.utils.data import DataLoader, TensorDataset


def synthetic_data(num_examples):
    """Points on the plane, labelled by the quadrant they lie in."""
    X = torch.rand(num_examples, 2) * 2 - 1
    y = 2 * (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
    return TensorDataset(X, y)


def relu(X):
    return torch.max(X, torch.zeros_like(X))


def net(X):
    H = relu(X @ W1 + b1)
    return H @ W2 + b2


def cross_entropy(y_hat, y):
    log_probabilities = y_hat - y_hat.logsumexp(dim=1, keepdim=True)
    return -log_probabilities[range(len(y_hat)), y]


def sgd(params, lr):
    """Minibatch stochastic gradient descent."""
    with torch.no_grad():
        for param in params:
            param -= lr * param.grad
            param.grad.zero_()


def evaluate_accuracy(data_iter):
    with torch.no_grad():
        correct = sum((net(X).argmax(dim=1) == y).sum().item() for X, y in data_iter)
    return correct / len(data_iter.dataset)


torch.manual_seed(7)
train_iter = DataLoader(synthetic_data(600), batch_size=20, shuffle=True)
test_iter = DataLoader(synthetic_data(400), batch_size=100, shuffle=False)

num_inputs, num_hiddens, num_outputs = 2, 32, 4
W1 = torch.randn(num_inputs, num_hiddens, requires_grad=True)
b1 = torch.zeros(num_hiddens, requires_grad=True)
W2 = (torch.randn(num_hiddens, num_outputs) * 0.1).requires_grad_()
b2 = torch.zeros(num_outputs, requires_grad=True)
model = {"W1": W1, "b1": b1, "W2": W2, "b2": b2}

for epoch in range(2):
    for X, y in train_iter:
        loss = cross_entropy(net(X), y).mean()
        loss.backward()
        sgd([W1, b1, W2, b2], lr=0.5)
    print(f"epoch {epoch + 1}, test acc {evaluate_accuracy(test_iter):.3f}")

print(f"accuracy {evaluate_accuracy(test_iter):.3f}")
