"""Gradients with respect to inputs, double backward, functional transforms."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

from whole_programs._small_data import blobs, images, line, weights


def wgan_gp():
    """WGAN-GP: autograd.grad at interpolates with create_graph, the norm per sample, penalty in the loss."""
    torch.manual_seed(0)
    x, _ = blobs(26)
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1, bias=False))
    generator = nn.Linear(3, 6)
    oc, og = torch.optim.SGD(critic.parameters(), lr=0.05), torch.optim.SGD(generator.parameters(), lr=0.05)
    log = []
    for i, (real,) in enumerate(DataLoader(TensorDataset(x), batch_size=8, shuffle=True)):
        fake = generator(torch.randn(real.size(0), 3)).detach()
        alpha = torch.rand(real.size(0), 1)
        between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        score = critic(between)
        (gradient,) = torch.autograd.grad(score, between, grad_outputs=torch.ones_like(score), create_graph=True, retain_graph=True)
        penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        oc.zero_grad()
        loss.backward()
        oc.step()
        log.append((loss.item(), penalty.item(), gradient.abs().max().item()))
        if i % 2 == 1:
            og.zero_grad()
            g = -critic(generator(torch.randn(len(real), 3))).mean()
            g.backward()
            og.step()
            log.append(g.item())
    return {"log": log, "critic": weights(critic), "generator": weights(generator)}


def r1_penalty_on_a_sum():
    """StyleGAN's R1: gradient of the summed scores with respect to real images."""
    torch.manual_seed(0)
    x, _ = images(26)
    critic = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Softplus(), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.02)
    log = []
    for (a,) in DataLoader(TensorDataset(x), batch_size=7):
        a.requires_grad_()
        out = critic(a)
        g = torch.autograd.grad(out.sum(), a, create_graph=True)[0]
        r1 = g.pow(2).reshape(g.shape[0], -1).sum(1).mean()
        loss = F.softplus(-out).mean() + 0.5 * r1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append((loss.item(), r1.item(), tuple(g.shape)))
    return {"log": log, "weights": weights(critic)}


def saliency():
    """Saliency maps: x.requires_grad_(), backward of the top scores, x.grad.abs().max(1)."""
    torch.manual_seed(0)
    x, y = images(26, c=2, s=4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 5), nn.Tanh(), nn.Linear(5, 3)).eval()
    maps, grads = [], []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        a.requires_grad_()
        out = model(a)
        out.gather(1, b[:, None]).sum().backward()
        maps.append(a.grad.abs().amax(1))
        grads.append((a.grad[0].norm().item(), a.grad.mean().item(), a.is_leaf))
        model.zero_grad()
    return {"maps": torch.cat(maps), "grads": grads}


def fgsm_training():
    """Adversarial training: FGSM from x.grad of a mean loss, then a step on clean and perturbed samples."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        a.requires_grad = True
        F.cross_entropy(model(a), b).backward()
        gradient = a.grad.data
        attacked = torch.clamp(a + 0.1 * gradient.sign(), -3, 3).detach()
        model.zero_grad()
        loss = 0.5 * F.cross_entropy(model(a.detach()), b) + 0.5 * F.cross_entropy(model(attacked), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), gradient.norm().item()))
    return {"loss": losses, "weights": weights(model)}


def pgd_attack():
    """PGD: several steps on a delta of the batch's shape, normalised per sample, and robust accuracy."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).eval()
    right, norms = 0, []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        delta = torch.zeros_like(a).uniform_(-0.1, 0.1).requires_grad_(True)
        for _ in range(3):
            loss = F.cross_entropy(model(a + delta), b)
            (g,) = torch.autograd.grad(loss, [delta])
            with torch.no_grad():
                delta += 0.3 * g / (g.norm(dim=1, keepdim=True) + 1e-8)
                delta *= (0.5 / delta.norm(dim=1, keepdim=True)).clamp(max=1)
        with torch.no_grad():
            right += (model(a + delta).argmax(1) == b).sum().item()
        norms.append((delta.detach().norm(dim=1).tolist(), loss.item(), g.norm().item()))
    return {"right": right, "norms": norms}


def maml():
    """MAML: an inner step on the first half of a batch with create_graph, the outer loss on the second half."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        half = len(a) // 2
        names, params = zip(*model.named_parameters(), strict=True)
        inner = F.mse_loss(functional_call(model, dict(zip(names, params, strict=True)), a[:half]), b[:half])
        grads = torch.autograd.grad(inner, params, create_graph=True)
        fast = {n: p - 0.1 * g for n, p, g in zip(names, params, grads, strict=True)}
        loss = F.mse_loss(functional_call(model, fast, (a[half:],)), b[half:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((inner.item(), loss.item(), grads[0].norm().item()))
    return {"loss": losses, "weights": weights(model)}


def per_sample_gradients_by_vmap():
    """DP-SGD: per-sample gradients by vmap(grad), clipped per sample and averaged by hand."""
    torch.manual_seed(0)
    x, y = line(26)
    model = nn.Linear(5, 1)
    params = {k: v.detach().clone() for k, v in model.named_parameters()}

    def one(p, a, b):
        return F.mse_loss(functional_call(model, p, (a[None],)), b[None])

    log = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        each = vmap(grad(one), in_dims=(None, 0, 0))(params, a, b)
        norm = sum(g.flatten(1).pow(2).sum(1) for g in each.values()).sqrt()
        factor = (1.0 / (norm + 1e-6)).clamp(max=1)
        for k in params:
            params[k] = params[k] - 0.1 * torch.einsum("n,n...->...", factor, each[k]) / a.shape[0]
        log.append((norm.tolist(), factor.mean().item()))
    return {"log": log, **params}


def jacobians_by_functorch():
    """vmap(jacrev) of a model over a batch, and torch.func.grad of a loss over all parameters."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    params = dict(model.named_parameters())
    seen = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        jacobian = vmap(jacrev(lambda r: functional_call(model, params, (r,))))(a)
        whole = grad(lambda p, a=a, b=b: F.cross_entropy(functional_call(model, p, (a,)), b))(params)
        seen.append((tuple(jacobian.shape), jacobian.pow(2).sum((1, 2)).tolist(), [g.norm().item() for g in whole.values()]))
    return {"seen": seen}


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.scale * g, None


class _Standardise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        mean, std = x.mean(0), x.std(0, unbiased=False) + 1e-3
        ctx.save_for_backward(std)
        return (x - mean) / std

    @staticmethod
    def backward(ctx, g):
        (std,) = ctx.saved_tensors
        return (g - g.mean(0)) / std


def custom_autograd_functions():
    """Gradient reversal (row by row) and a hand-written standardisation over the batch, applied in the loop."""
    torch.manual_seed(0)
    x, y = blobs(26)
    body, head, domain = nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters(), *domain.parameters()], lr=0.1)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8, drop_last=True):
        f = _Standardise.apply(body(a))
        adversary = domain(_Reverse.apply(f, 0.3)).squeeze(1)
        loss = F.cross_entropy(head(f), b) + F.binary_cross_entropy_with_logits(adversary, (b == 0).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((loss.item(), f.std().item()))
    return {"loss": losses, "weights": weights(body), "domain": weights(domain)}


def custom_function_in_a_module():
    """A module that applies a custom autograd.Function to its rows (straight-through sign)."""

    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sign()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * (x.abs() < 1)

    class Binary(nn.Linear):
        def forward(self, x):
            return super().forward(Sign.apply(x))

    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Sequential(nn.Linear(6, 8), Binary(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        loss = F.cross_entropy(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "weights": weights(model)}


def gradients_of_intermediate_features():
    """Grad-CAM: a forward hook keeps features, retain_grad, weights from the features' gradients."""
    torch.manual_seed(0)
    x, y = images(26)
    conv, head = nn.Conv2d(1, 3, 3), nn.Linear(3, 3)
    kept = {}
    conv.register_forward_hook(lambda module, args, output: kept.update(features=output))
    cams = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        f = conv(a).tanh()
        f.retain_grad()
        out = head(f.mean((2, 3)))
        out[range(len(b)), b].sum().backward()
        cam = (f.grad.mean((2, 3), keepdim=True) * f).sum(1).relu()
        cams.append((cam.flatten(1).sum(1).tolist(), kept["features"].detach().mean((2, 3)).sum(1).tolist()))
        conv.zero_grad()
        head.zero_grad()
    return {"cams": cams}


def hessian_vector_and_gradient_norm_penalty():
    """Penalises the norm of the parameters' gradient (double backward) and estimates a Hessian trace."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        loss = F.cross_entropy(model(a), b)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum(g.pow(2).sum() for g in grads)
        v = [torch.randint_like(p, 2) * 2 - 1 for p in model.parameters()]
        hv = torch.autograd.grad(grads, model.parameters(), grad_outputs=v, retain_graph=True)
        trace = sum((h * u).sum() for h, u in zip(hv, v, strict=True)).item()
        optimizer.zero_grad()
        (loss + 0.1 * penalty).backward()
        optimizer.step()
        log.append((loss.item(), penalty.item(), trace))
    return {"log": log, "weights": weights(model)}


def physics_informed():
    """A PINN: first and second derivatives of the output with respect to the inputs, per column."""
    torch.manual_seed(0)
    t = torch.rand(26, 2)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for (p,) in DataLoader(TensorDataset(t), batch_size=8, shuffle=True):
        p = p.clone().requires_grad_(True)
        u = model(p)
        du = torch.autograd.grad(u, p, torch.ones_like(u), create_graph=True)[0]
        uxx = torch.autograd.grad(du[:, 0].sum(), p, create_graph=True)[0][:, :1]
        residual = du[:, 1:] - 0.1 * uxx
        loss = residual.pow(2).mean() + (u - torch.sin(p[:, :1])).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "weights": weights(model)}


def gradients_by_hand_of_a_part():
    """Two losses with backward(gradient=...), retain_graph, inputs=..., and projected gradients (PCGrad)."""
    torch.manual_seed(0)
    x, y = blobs(26)
    model = nn.Linear(6, 3, bias=False)
    log = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=7):
        out = model(a)
        one, two = F.cross_entropy(out, b), (out.sum(1) - 1).pow(2).mean()
        (g,) = torch.autograd.grad(one, model.weight, retain_graph=True)
        (h,) = torch.autograd.grad(two, model.weight, retain_graph=True)
        dot = (g * h).sum()
        if dot < 0:
            g = g - dot / h.pow(2).sum() * h
        model.weight.grad = None
        out.backward(gradient=torch.ones_like(out) / out.numel(), inputs=[model.weight])
        with torch.no_grad():
            model.weight -= 0.1 * (g + h) + 0.1 * model.weight.grad
        log.append((1 + dot.item(), model.weight.grad.norm().item()))
    return {"log": log, "weights": weights(model)}


def hooks_on_gradients():
    """Tensor hooks scale gradients of a hidden layer and record their per-sample norms."""
    torch.manual_seed(0)
    x, y = blobs(26)
    body, head = nn.Linear(6, 4), nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    norms = []
    for a, b in DataLoader(TensorDataset(x, y), batch_size=8):
        h = body(a).tanh()
        h.register_hook(lambda g: (norms.append(g.norm(dim=1).tolist()), g * 0.5)[1])
        loss = F.cross_entropy(head(h), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"norms": norms, "weights": weights(body), "head": weights(head)}
