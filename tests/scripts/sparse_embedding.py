"""A bag of words over an embedding with sparse gradients and SparseAdam, beside a dense part with Adam."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

g = torch.Generator().manual_seed(0)
words, topics = 300, 4
topic = torch.randint(topics, (1200,), generator=g)
texts = (torch.randint(words // topics, (1200, 12), generator=g) + topic[:, None] * (words // topics)) % words
noise = torch.rand(1200, 12, generator=g) < 0.4
texts[noise] = torch.randint(words, (int(noise.sum()),), generator=g)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(words, 16, mode="mean", sparse=True)
        self.first = nn.Embedding(words, 8, sparse=True)
        self.head = nn.Linear(24, topics)

    def forward(self, text):
        return self.head(F.relu(torch.cat([self.words(text), self.first(text[:, 0])], dim=1)))


model = Model()
sparse = torch.optim.SparseAdam([*model.words.parameters(), *model.first.parameters()], lr=0.03)
dense = torch.optim.Adam(model.head.parameters(), lr=0.03)
for epoch in range(2):
    for text, label in DataLoader(TensorDataset(texts[:900], topic[:900]), batch_size=20, shuffle=True):
        sparse.zero_grad()
        dense.zero_grad()
        F.cross_entropy(model(text), label).backward()
        assert model.words.weight.grad.is_sparse
        sparse.step()
        dense.step()
with torch.no_grad():
    print(f"accuracy {(model(texts[900:]).argmax(1) == topic[900:]).float().mean():.4f}")
