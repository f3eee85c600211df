"""A GAN: two networks, two optimizers, two backwards on the discriminator and one through both."""

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(999)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

nz = 4
num_epochs = 7
real_label, fake_label = 1.0, 0.0

center, spread = torch.tensor([2.0, -1.0]), 0.5
dataset = TensorDataset(center + spread * torch.randn(1000, 2))
dataloader = DataLoader(dataset, batch_size=50, shuffle=True)

netG = nn.Sequential(nn.Linear(nz, 32), nn.ReLU(True), nn.Linear(32, 2)).to(device)
netD = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2, inplace=True), nn.Linear(32, 1), nn.Sigmoid()).to(device)
model = nn.ModuleDict({"generator": netG, "discriminator": netD})

criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=0.005, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.003, betas=(0.5, 0.999))

for epoch in range(num_epochs):
    for data in dataloader:
        # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
        netD.zero_grad()
        real = data[0].to(device)
        label = torch.full((real.size(0),), real_label, device=device)
        errD_real = criterion(netD(real).view(-1), label)
        errD_real.backward()

        noise = torch.randn(real.size(0), nz, device=device)
        fake = netG(noise)
        label.fill_(fake_label)
        errD_fake = criterion(netD(fake.detach()).view(-1), label)
        errD_fake.backward()
        optimizerD.step()

        # (2) Update G: maximize log(D(G(z)))
        netG.zero_grad()
        label.fill_(real_label)
        errG = criterion(netD(fake).view(-1), label)
        errG.backward()
        optimizerG.step()
    print(f"[{epoch}/{num_epochs}] Loss_D: {errD_real.item() + errD_fake.item():.4f} Loss_G: {errG.item():.4f}")

# A sample counts as good when it lies within four standard deviations of the real ones' center.
netG.eval()
with torch.no_grad():
    samples = netG(torch.randn(2000, nz, device=device)).cpu()
distance = (samples - center).norm(dim=1)
print(f"accuracy {(distance < 4 * spread).float().mean().item():.4f}")
