import json

import numpy as np
import torch
from sklearn.datasets import make_classification
from sklearn.model_selection import GridSearchCV
from skorch import NeuralNetClassifier
from skorch.callbacks import Checkpoint, EarlyStopping
from torch import nn

torch.manual_seed(0)
X, y = make_classification(96, 8, n_informative=4, random_state=0)
X, y = X.astype(np.float32), y.astype(np.int64)


class Network(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.first, self.second = nn.Linear(8, hidden), nn.Linear(hidden, 2)

    def forward(self, x):
        return torch.softmax(self.second(torch.relu(self.first(x))), -1)


best = Checkpoint(dirname="checkpoints")
net = NeuralNetClassifier(
    Network, max_epochs=5, lr=0.1, batch_size=16, iterator_train__shuffle=True, callbacks=[best, EarlyStopping(patience=3)], verbose=0
)
net.fit(X, y)
for row in net.history:
    read = sum(batch["train_batch_size"] for batch in row["batches"] if "train_batch_size" in batch)
    print("RESULT", json.dumps({"read": read} | {key: float(row[key]) for key in ("train_loss", "valid_loss", "valid_acc")}))
net.load_params(checkpoint=best)
print("RESULT", json.dumps({"score": net.score(X, y), "predicted": net.predict(X).tolist()}))

search = GridSearchCV(
    NeuralNetClassifier(Network, max_epochs=3, lr=0.1, batch_size=16, verbose=0, train_split=False),
    {"lr": [0.01, 0.1], "module__hidden": [4, 8]}, cv=3, scoring="accuracy",
)
search.fit(X, y)
scores = search.cv_results_["mean_test_score"].tolist()
print("RESULT", json.dumps({"best": search.best_params_, "scores": scores}))
torch.save({**net.module_.state_dict(), **{f"best.{k}": v for k, v in search.best_estimator_.module_.state_dict().items()}}, "final.pt")
