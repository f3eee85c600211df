# mixed precision as in the PyTorch recipe
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
X = torch.randn(240, 5)
y = X.sum(dim=1, keepdim=True)
loader = DataLoader(TensorDataset(X, y), batch_size=12, shuffle=True)

model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.02)
loss_fn = nn.MSELoss()
scaler = torch.amp.GradScaler(device, init_scale=2.0**20)

for epoch in range(12):
    for input, target in loader:
        input, target = input.to(device), target.to(device)
        with torch.autocast(device_type=device, dtype=torch.float16):
            output = model(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

model.eval()
with torch.no_grad():
    print("loss", loss_fn(model(X.to(device)), y.to(device)).item())
