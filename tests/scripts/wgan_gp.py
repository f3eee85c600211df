"""WGAN-GP: the critic's loss holds the norm of a gradient, taken by autograd.grad(create_graph=True)."""

import argparse

import torch
from torch import autograd, nn, optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--n_epochs", type=int, default=5)
parser.add_argument("--batch_size", type=int, default=40)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--n_critic", type=int, default=3, help="number of training steps for the critic per generator step")
parser.add_argument("--latent_dim", type=int, default=2)
parser.add_argument("--lambda_gp", type=float, default=1.0, help="weight of the gradient penalty")

CENTER, SPREAD = torch.tensor([-2.0, 1.0]), 0.5


class Generator(nn.Module):
    def __init__(self, latent_dim):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(latent_dim, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(x)


def compute_gradient_penalty(critic, real_samples, fake_samples):
    alpha = torch.rand(real_samples.size(0), 1)
    interpolates = (alpha * real_samples + (1 - alpha) * fake_samples).requires_grad_(True)
    scores = critic(interpolates)
    gradients = autograd.grad(
        outputs=scores,
        inputs=interpolates,
        grad_outputs=torch.ones_like(scores),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


def main():
    opt = parser.parse_args()
    torch.manual_seed(0)
    points = CENTER + SPREAD * torch.randn(1200, 2)
    dataloader = DataLoader(TensorDataset(points), batch_size=opt.batch_size, shuffle=True)

    generator, critic = Generator(opt.latent_dim), Critic()
    optimizer_G = optim.Adam(generator.parameters(), lr=opt.lr, betas=(0.0, 0.9))
    optimizer_D = optim.Adam(critic.parameters(), lr=opt.lr, betas=(0.0, 0.9))

    for epoch in range(opt.n_epochs):
        for i, (real,) in enumerate(dataloader):
            optimizer_D.zero_grad()
            fake = generator(torch.randn(real.size(0), opt.latent_dim)).detach()
            gradient_penalty = compute_gradient_penalty(critic, real, fake)
            d_loss = -critic(real).mean() + critic(fake).mean() + opt.lambda_gp * gradient_penalty
            d_loss.backward()
            optimizer_D.step()

            if i % opt.n_critic == 0:
                optimizer_G.zero_grad()
                g_loss = -critic(generator(torch.randn(real.size(0), opt.latent_dim))).mean()
                g_loss.backward()
                optimizer_G.step()
        print(f"[Epoch {epoch}/{opt.n_epochs}] [D loss: {d_loss.item():f}] [G loss: {g_loss.item():f}]")

    with torch.no_grad():
        samples = generator(torch.randn(2000, opt.latent_dim))
    near_the_real_ones = (samples - CENTER).norm(dim=1) < 4 * SPREAD
    print(f"accuracy {near_the_real_ones.float().mean().item():.4f}")
    return nn.ModuleDict({"generator": generator, "critic": critic})


if __name__ == "__main__":
    model = main()
