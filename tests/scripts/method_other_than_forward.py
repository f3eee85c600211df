"""The model is trained through methods of its own; it has no forward()."""

import torch
from torch import nn
from torch.utils.data import DataLoader


class AutoEncoder(nn.Module):
    def __init__(self, n_features, n_latent):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(n_features, 32), nn.ReLU(), nn.Linear(32, n_latent))
        self.decoder = nn.Sequential(nn.Linear(n_latent, 32), nn.ReLU(), nn.Linear(32, n_features))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, z):
        return self.decoder(z)

    def reconstruction_loss(self, x):
        return nn.functional.mse_loss(self.decode(self.encode(x)), x)


torch.manual_seed(11)
mixing = torch.randn(3, 16)
samples = torch.randn(960, 3) @ mixing + 0.3 * torch.randn(960, 16)
train_data, test_data = samples[:660], samples[660:]
loader = DataLoader(train_data, batch_size=32, shuffle=True, drop_last=True)

model = AutoEncoder(n_features=16, n_latent=3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for _epoch in range(3):
    model.train()
    for x in loader:
        loss = model.reconstruction_loss(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    print(f"loss {model.reconstruction_loss(test_data).item():.4f}")
