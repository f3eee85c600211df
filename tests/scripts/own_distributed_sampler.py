"""A script that always has a DistributedSampler: on a single process it is for one replica."""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def init_distributed_mode(args):
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        torch.distributed.init_process_group("gloo", init_method="env://")
        args.distributed = True
    else:
        print("Not using distributed mode")
        args.rank, args.world_size, args.distributed = 0, 1, False


def main(args):
    init_distributed_mode(args)
    torch.manual_seed(args.seed)
    x = torch.randn(550, 6)
    y = (x[:, :3].sum(dim=1) > x[:, 3:].sum(dim=1)).long()
    dataset_train, dataset_val = TensorDataset(x[:350], y[:350]), TensorDataset(x[350:], y[350:])
    sampler_train = DistributedSampler(dataset_train, num_replicas=args.world_size, rank=args.rank, shuffle=True)
    sampler_val = torch.utils.data.SequentialSampler(dataset_val)
    data_loader_train = DataLoader(dataset_train, sampler=sampler_train, batch_size=args.batch_size, drop_last=True)
    data_loader_val = DataLoader(dataset_val, sampler=sampler_val, batch_size=100)

    model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 2))
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        data_loader_train.sampler.set_epoch(epoch)
        model.train(True)
        for samples, targets in data_loader_train:
            loss = nn.functional.cross_entropy(model(samples), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        model.eval()
        with torch.no_grad():
            correct = sum((model(samples).argmax(1) == targets).sum().item() for samples, targets in data_loader_val)
        print(f"Epoch {epoch}: accuracy {correct / len(dataset_val):.3f}")
    print(f"accuracy {correct / len(dataset_val):.4f}")
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", default=14, type=int)
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--lr", default=1e-2, type=float)
    parser.add_argument("--seed", default=0, type=int)
    model = main(parser.parse_args())
