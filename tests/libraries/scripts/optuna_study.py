import json

import optuna
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 4)
y = (x.sum(1) > 0).long()
train, val = DataLoader(TensorDataset(x[:48], y[:48]), 8, shuffle=True), DataLoader(TensorDataset(x[48:], y[48:]), 8)


def objective(trial):
    torch.manual_seed(trial.number)
    width = trial.suggest_int("width", 2, 8)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
    optimizer = getattr(torch.optim, trial.suggest_categorical("optimizer", ["SGD", "Adagrad"]))(model.parameters(), trial.suggest_float("lr", 1e-3, 1, log=True))
    for epoch in range(3):
        model.train()
        read = 0
        for inputs, labels in train:
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            read += len(inputs)
        model.eval()
        with torch.no_grad():
            held_out = sum(nn.functional.cross_entropy(model(inputs), labels).item() for inputs, labels in val) / len(val)
        print("RESULT", json.dumps({"trial": trial.number, "epoch": epoch, "read": read, "loss": held_out}))
        trial.report(held_out, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    torch.save(model.state_dict(), f"trial{trial.number}.pt")
    return held_out


study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=4), pruner=optuna.pruners.MedianPruner(2), storage="sqlite:///study.db")
study.optimize(objective, n_trials=8)
print("RESULT", json.dumps({"best": study.best_value, **study.best_params, "states": " ".join(trial.state.name for trial in study.trials)}))
torch.save(torch.load(f"trial{study.best_trial.number}.pt"), "final.pt")
