import random
import torch
from torch import nn

torch.manual_seed(0)
random.seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(256, 8)
y = (x @ torch.randn(8, 1)).tanh()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True)
for epoch in range(6):
    for a, b in loader:
        opt.zero_grad()
        if random.random() < 0.5:
            loss = nn.functional.mse_loss(model(a), b)
            loss.backward()
        else:
            noisy = a + 0.1 * torch.randn_like(a)
            loss = nn.functional.l1_loss(model(noisy), b)
            loss.backward()
        opt.step()
with torch.no_grad():
    print(f"loss {nn.functional.mse_loss(model(x), y).item():.4f}")
