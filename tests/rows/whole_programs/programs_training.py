"""Training loops of many kinds."""

import copy
import io

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from whole_programs._small_data import blobs, images, line, weights


def mixup():
    """Mixup with a permutation and a Beta-distributed weight."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    beta = torch.distributions.Beta(0.4, 0.4)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True):
        lam = beta.sample().item()
        index = torch.randperm(a.size(0))
        mixed, hot = lam * a + (1 - lam) * a[index, :], F.one_hot(b, 3).float()
        loss = F.cross_entropy(model(mixed), lam * hot + (1 - lam) * hot[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((lam, loss.item()))
    return {"loss": losses, "weights": weights(model)}


def mixup_per_sample():
    """Mixup with a weight for each sample, drawn with the batch's size and reshaped."""
    torch.manual_seed(0)
    x, y = images(26)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True):
        lam = torch.distributions.Beta(0.4, 0.4).sample((a.shape[0],))
        index = torch.randperm(len(a))
        w = lam.view(-1, 1, 1, 1)
        out = model(w * a + (1 - w) * a[index])
        each = F.cross_entropy(out, b, reduction="none"), F.cross_entropy(out, b[index], reduction="none")
        loss = (lam * each[0] + (1 - lam) * each[1]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "weights": weights(model)}


def diffusion():
    """DDPM: random timesteps for each sample, table lookup, noise like x, conditioning on t / T."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    steps = 20
    alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.2, steps), 0)
    model = nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=8, shuffle=True):
        t = torch.randint(0, steps, (a.shape[0],), device=a.device)
        noise = torch.randn_like(a)
        level = alphas[t].view(-1, 1)
        noisy = level.sqrt() * a + (1 - level).sqrt() * noise
        out = model(torch.cat([noisy, (t / steps)[:, None]], 1))
        each = F.mse_loss(out, noise, reduction="none").mean(dim=list(range(1, out.ndim)))
        loss = (each * (level.squeeze(1) + 0.5)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), t.tolist(), each[0].item()))
    with torch.no_grad():
        sample = torch.randn(4, 6)
        for i in reversed(range(0, steps, 5)):
            sample = sample - 0.1 * model(torch.cat([sample, torch.full((4, 1), i / steps)], 1))
    return {"loss": losses, "sample": sample, "weights": weights(model)}


def gan_with_two_optimizers():
    """A GAN: latents of the batch's size, detach for the critic, accuracies of both halves."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))
    critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    og, oc = torch.optim.SGD(generator.parameters(), lr=0.05), torch.optim.SGD(critic.parameters(), lr=0.05)
    bce = nn.BCEWithLogitsLoss()
    log = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=8, shuffle=True):
        n = a.size(0)
        real, fake = torch.ones(n, 1), torch.zeros(n, 1)
        made = generator(torch.randn(n, 3))
        oc.zero_grad()
        on_real, on_fake = critic(a), critic(made.detach())
        loss_c = bce(on_real, real) + bce(on_fake, fake)
        loss_c.backward()
        oc.step()
        og.zero_grad()
        loss_g = bce(critic(made), real)
        loss_g.backward()
        og.step()
        log.append((loss_c.item(), loss_g.item(), ((on_real > 0).float().mean() + (on_fake < 0).float().mean()).item() / 2))
    return {"log": log, "generator": weights(generator), "critic": weights(critic)}


def vae_reparameterized_in_the_script():
    """A VAE whose noise the script draws with randn_like, with the KL term summed over the batch."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    encoder, decoder = nn.Linear(6, 4), nn.Linear(2, 6)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    total, log = 0.0, []
    loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
    for (a,) in loader:
        mu, logvar = encoder(a).chunk(2, dim=1)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
        reconstruction = F.mse_loss(decoder(z), a, reduction="sum")
        kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        loss = (reconstruction + kl) / len(a)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(a)
        log.append((kl.item(), mu.std(0, unbiased=False).tolist()))
    return {"total": total / len(loader.dataset), "log": log, "encoder": weights(encoder), "decoder": weights(decoder)}


def early_stopping_and_best_epoch():
    """Validates after each epoch, keeps the best epoch's weights in a BytesIO and stops early."""
    torch.manual_seed(0)
    x, y = line(40)
    train, valid = random_split(TensorDataset(x, y), [27, 13])
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    best, bad, saved, log = float("inf"), 0, None, []
    for epoch in range(6):
        model.train()
        running, seen = 0.0, 0
        for a, b in DataLoader(train, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            loss = F.mse_loss(model(a), b)
            loss.backward()
            optimizer.step()
            running += loss.item() * a.size(0)
            seen += a.size(0)
        model.eval()
        losses = []
        with torch.no_grad():
            for a, b in DataLoader(valid, batch_size=5):
                losses.append(F.mse_loss(model(a), b))
        valid_loss = sum(losses) / len(losses)
        schedule.step(valid_loss)
        log.append((epoch, running / seen, f"{valid_loss:.3f}", optimizer.param_groups[0]["lr"]))
        if valid_loss < best:
            best, bad, saved = valid_loss.item(), 0, io.BytesIO()
            torch.save({"model": model.state_dict(), "loss": valid_loss}, saved)
        else:
            bad += 1
            if bad == 2:
                break
    saved.seek(0)
    loaded = torch.load(saved)
    model.load_state_dict(loaded["model"])
    return {"log": log, "best": best, "loaded": float(loaded["loss"]), "weights": weights(model)}


def accumulate_and_clip():
    """Accumulates gradients over 2 batches, clips their norm and records it."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    norms, losses = [], []
    for i, (a, b) in enumerate(loader):
        loss = F.mse_loss(model(a), b) / 2
        loss.backward()
        losses.append(loss.item())
        if (i + 1) % 2 == 0 or i + 1 == len(loader):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norms.append(f"{norm:.3f}")
            norms.append(model.weight.grad.norm().item())
            optimizer.step()
            optimizer.zero_grad()
    return {"loss": losses, "norms": norms, "weights": weights(model)}


def lbfgs_closure():
    """LBFGS with a closure that is called several times for a batch."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
    losses, calls = [], 0
    for a, b in DataLoader(TensorDataset(x, y), batch_size=13):

        def closure(a=a, b=b):
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = F.mse_loss(model(a), b) + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return {"loss": losses, "calls": calls, "weights": weights(model)}


def sam_two_steps():
    """Sharpness-aware minimization: climb by the gradient's norm, second backward, go back and step."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))
        moved = []
        with torch.no_grad():
            for p in model.parameters():
                e = p.grad * (0.1 / (norm + 1e-12))
                p.add_(e)
                moved.append(e)
        optimizer.zero_grad()
        second = F.cross_entropy(model(a), b)
        second.backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moved, strict=True):
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), second.item(), norm.item()))
    return {"loss": losses, "weights": weights(model)}


def ema_of_weights():
    """Keeps an averaged copy of the model (AveragedModel and by hand) and evaluates with it."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    ema = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    for a, b in loader:
        loss = F.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averaged.update_parameters(model)
        for key, value in model.state_dict().items():
            ema.state_dict()[key].mul_(0.9).add_(value, alpha=0.1)
    with torch.no_grad():
        total = sum(F.mse_loss(averaged(a), b, reduction="sum").item() + F.l1_loss(ema(a), b, reduction="sum").item() for a, b in loader)
    return {"total": total, "averaged": weights(averaged.module), "ema": weights(ema)}


def functional_model_of_bare_parameters():
    """Logistic regression as x @ w + b with bare tensors that require gradients, and a hand-written step."""
    torch.manual_seed(0)
    x, y = blobs(26, classes=2)
    w, c = torch.zeros(6, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y.float()), batch_size=8):
        p = torch.sigmoid(a @ w + c).squeeze(1)
        loss = -(b * torch.log(p + 1e-7) + (1 - b) * torch.log(1 - p + 1e-7)).mean()
        loss.backward()
        with torch.no_grad():
            w -= 0.5 * w.grad
            c -= 0.5 * c.grad
            w.grad.zero_()
            c.grad.zero_()
        losses.append((loss.item(), ((p > 0.5) == b).float().mean().item()))
    return {"loss": losses, "w": w.detach().clone(), "c": c.item()}


def closed_form_gradient_by_hand():
    """Linear regression without autograd: w -= lr * x.T @ (x @ w - y) / len(x), and normal equations."""
    torch.manual_seed(0)
    x, y = line(26)
    w, xtx, xty = torch.zeros(5, 1), torch.zeros(5, 5), torch.zeros(5, 1)
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        w -= 0.1 * a.T @ (a @ w - b) / len(a)
        xtx += a.t().mm(a)
        xty += torch.einsum("ni,nj->ij", a, b)
    return {"w": w, "solution": torch.linalg.solve(xtx + 0.01 * torch.eye(5), xty)}


def batch_norm_train_and_eval():
    """A convolutional net with batch norms, trained, then evaluated with running statistics."""
    torch.manual_seed(0)
    x, y = images(27)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    losses, right = [], 0
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        total = 0.0
        for a, b in loader:
            out = model(a)
            total += F.cross_entropy(out, b, reduction="sum").item()
            right += out.argmax(-1).eq(b).sum().item()
    bn = model[1]
    return {
        "loss": losses,
        "total": total,
        "mean": bn.running_mean.clone(),
        "var": bn.running_var.clone(),
        "n": int(bn.num_batches_tracked),
    }


def counter_of_samples_steers_a_decay():
    """The learning rate and a temperature follow the number of samples seen so far."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen, log = 0, []
    for _ in range(2):
        for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
            seen += a.shape[0]
            for group in optimizer.param_groups:
                group["lr"] = 0.5 * 0.99**seen
            loss = F.cross_entropy(model(a) / max(0.5, 2 - seen / 30), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.append((seen, loss.item(), optimizer.param_groups[0]["lr"]))
    return {"log": log, "weights": weights(model)}


def stateful_rnn():
    """Hidden states are carried from batch to batch with detach; the batch size is fixed."""
    torch.manual_seed(0)
    x = torch.randn(24, 4, 3)
    y = x.cumsum(0).mean((1, 2))[:, None]
    rnn, head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 1)
    optimizer = torch.optim.SGD([*rnn.parameters(), *head.parameters()], lr=0.05)
    state, losses = None, []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=6, drop_last=True):
        out, state = rnn(a, state)
        loss = F.mse_loss(head(out[:, -1]), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = tuple(s.detach() for s in state)
        losses.append((loss.item(), state[0].norm().item(), tuple(state[1].shape)))
    return {"loss": losses, "h": state[0][0].clone(), "weights": weights(rnn)}


def rnn_cell_with_initial_zeros():
    """A GRUCell stepped by hand with h = torch.zeros(x.size(0), hidden), teacher forcing by a coin."""
    torch.manual_seed(0)
    x = torch.randn(26, 5, 3)
    cell, head = nn.GRUCell(3, 6), nn.Linear(6, 3)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
    losses = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=8, shuffle=True):
        h, step, loss = torch.zeros(a.size(0), 6), a[:, 0], 0.0
        for t in range(1, a.size(1)):
            h = cell(step, h)
            out = head(h)
            loss = loss + F.mse_loss(out, a[:, t])
            step = a[:, t] if torch.rand(()) < 0.5 else out
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "h": h.detach().sum(1).tolist(), "weights": weights(cell)}


def distillation():
    """A student learns from a teacher's soft targets; the temperature adapts to the batch's agreement."""
    torch.manual_seed(0)
    x, y = blobs(26)
    teacher, student = nn.Linear(6, 3).eval(), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.02)
    temperature, log = 2.0, []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        with torch.no_grad():
            soft = teacher(a)
        out = student(a)
        agree = (soft.argmax(1) == out.argmax(1)).float().mean()
        soft_loss = F.kl_div((out / temperature).log_softmax(1), (soft / temperature).softmax(1), reduction="batchmean")
        loss = F.cross_entropy(out, b) + temperature**2 * soft_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        temperature *= 0.9 if agree > 0.5 else 1.1
        log.append((loss.item(), agree.item(), temperature))
    return {"log": log, "weights": weights(student)}


def reinforce_with_baseline():
    """REINFORCE: actions from Categorical, rewards of the batch, advantage normalised over the batch."""
    torch.manual_seed(0)
    x, y = blobs(26)
    policy, value = nn.Linear(6, 3), nn.Linear(6, 1)
    optimizer = torch.optim.SGD([*policy.parameters(), *value.parameters()], lr=0.05)
    log = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        distribution = torch.distributions.Categorical(logits=policy(a))
        action = distribution.sample()
        reward = (action == b).float()
        v = value(a).squeeze(-1)
        advantage = reward - v.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-2)
        loss = -(distribution.log_prob(action) * advantage).mean() + F.mse_loss(v, reward) - 0.01 * distribution.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append((loss.item(), action.tolist(), reward.mean().item()))
    return {"log": log, "policy": weights(policy), "value": weights(value)}
