"""A siamese network: two forwards of one model, one backward."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

NUM_CLASSES, DIM, MARGIN = 6, 12, 2.0


class SiameseDataset(Dataset):
    """Pairs of points; the label is 1 when both come from the same class."""

    def __init__(self, centers, num_pairs):
        same = torch.rand(num_pairs) < 0.5
        first = torch.randint(NUM_CLASSES, (num_pairs,))
        other = (first + torch.randint(1, NUM_CLASSES, (num_pairs,))) % NUM_CLASSES
        second = torch.where(same, first, other)
        self.first = centers[first] + torch.randn(num_pairs, DIM)
        self.second = centers[second] + torch.randn(num_pairs, DIM)
        self.same = same.float()

    def __len__(self):
        return len(self.same)

    def __getitem__(self, index):
        return self.first[index], self.second[index], self.same[index]


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(inplace=True), nn.Linear(64, 8))

    def forward(self, x):
        return self.embed(x)


class ContrastiveLoss(nn.Module):
    def forward(self, output1, output2, same):
        distance = F.pairwise_distance(output1, output2)
        return (same * distance.pow(2) + (1 - same) * F.relu(MARGIN - distance).pow(2)).mean()


def main():
    torch.manual_seed(5)
    centers = 3 * torch.randn(NUM_CLASSES, DIM)
    train_loader = DataLoader(SiameseDataset(centers, 640), shuffle=True, batch_size=32)
    test_set = SiameseDataset(centers, 400)

    net = SiameseNetwork()
    criterion = ContrastiveLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for epoch in range(3):
        net.train()
        for x1, x2, same in train_loader:
            optimizer.zero_grad()
            output1 = net(x1)
            output2 = net(x2)
            loss = criterion(output1, output2, same)
            loss.backward()
            optimizer.step()
        print(f"Epoch {epoch}: current loss {loss.item():.4f}")

    net.eval()
    with torch.no_grad():
        distance = F.pairwise_distance(net(test_set.first), net(test_set.second))
    correct = (distance < MARGIN / 2) == test_set.same.bool()
    print(f"accuracy {correct.float().mean().item():.4f}")
    return net


if __name__ == "__main__":
    model = main()
