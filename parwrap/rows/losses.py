"""Loss functions of rows: their mean is that of the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parwrap.rows.tensors import NOT_BY_ROWS, Partial, Rows, as_partial, as_rows, collected, current, named, plain, signature_of

__all__ = ["CRITERION", "LOSSES", "cross_entropy", "loss", "whole_divisor"]

LOSSES = named("""
mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div soft_margin_loss
gaussian_nll_loss poisson_nll_loss triplet_margin_loss margin_ranking_loss cosine_embedding_loss hinge_embedding_loss multi_margin_loss
multilabel_margin_loss multilabel_soft_margin_loss triplet_margin_with_distance_loss
""")
"""Loss functions whose mean weighs all numbers alike."""


def loss(func: Any, args: tuple, kwargs: dict) -> Any:
    try:
        given = signature_of(func).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return NOT_BY_ROWS  # torch's own error says what is wrong
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return NOT_BY_ROWS
    x = next((each for each in given.values() if isinstance(each, Rows)), None)
    name, alone, reduction = func.__name__, func.__name__ in ALONE, given.get("reduction", "mean")
    if x is None or (x.row_dim != 0 and (not alone or reduction == "batchmean")) or (not alone and 0 in x.row_layout.per_rank):
        return NOT_BY_ROWS
    if given.get("weight") is not None and name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        return NOT_BY_ROWS  # their mean divides by the weights
    layout, from_right = x.row_layout, x.row_dim - x.ndim
    for key, each in given.items():
        if isinstance(each, Rows):
            alike = each.row_layout == layout and (each.row_dim - each.ndim == from_right if alone else each.row_dim == 0)
            if not alike:
                return NOT_BY_ROWS
            given[key] = plain(each)
        elif isinstance(each, Tensor):
            whole = collected(each)
            if alone and whole.ndim > x.ndim:
                return NOT_BY_ROWS
            if alone and whole.ndim >= -from_right and whole.shape[from_right] != 1:
                if whole.shape[from_right] != layout.n:
                    return NOT_BY_ROWS
                whole = layout.own(whole, whole.ndim + from_right)
            elif not alone and key != "weight" and whole.ndim:
                if whole.shape[0] != layout.n:
                    return NOT_BY_ROWS
                whole = layout.own(whole)
            given[key] = whole
    if not x.row_layout.mine and reduction != "none":
        given["reduction"] = "sum"
    result = func(**given)
    if reduction == "none":
        return as_rows(result, x.row_layout, x.row_dim if result.ndim == x.ndim else 0)
    if reduction == "sum":
        return as_partial(result * current().between.size)
    return as_partial(result if x.row_layout.weight == 1.0 or not x.row_layout.mine else result * x.row_layout.weight)


ALONE = frozenset(
    named("""
mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div soft_margin_loss
""")
)
"""Those that work number by number, so that rows may be in any dimension."""


CRITERION = "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"
"""The arguments of ``cross_entropy``, and of ``nll_loss`` except the last."""


def cross_entropy(func: Any, args: tuple, kwargs: dict) -> Any:
    """``cross_entropy`` and ``nll_loss``: their mean divides by the weights of the targets that count, of the whole batch."""
    given = dict(zip(CRITERION, args, strict=False), **kwargs)
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return NOT_BY_ROWS
    x, target = given["input"], given["target"]
    if not isinstance(x, Rows) or x.row_dim != 0 or isinstance(target, Partial) or x.ndim < 2:
        return NOT_BY_ROWS
    if isinstance(target, Rows):
        if target.row_layout != x.row_layout or target.row_dim != 0:
            return NOT_BY_ROWS
        target = plain(target)
    elif target.ndim and target.shape[0] == x.row_layout.n:
        target = x.row_layout.own(collected(target))
    else:
        return NOT_BY_ROWS
    weight = collected(given.get("weight"))
    given.update(input=plain(x), target=target)
    if weight is not None:
        given["weight"] = weight
    reduction = given.get("reduction", "mean")
    if reduction == "none":
        return as_rows(func(**given), x.row_layout, 0)
    size = current().between.size
    if reduction == "sum":
        return as_partial(func(**given) * size)
    if target.is_floating_point():
        if not x.row_layout.mine:
            return as_partial(func(**{**given, "reduction": "sum"}))
        return as_partial(func(**given) * x.row_layout.weight if x.row_layout.weight != 1.0 else func(**given))
    mine, whole = whole_divisor(target, weight, given.get("ignore_index", -100))
    if not whole:
        return as_partial(func(**given) if not mine and x.row_layout.mine else func(**{**given, "reduction": "sum"}) / 0.0)
    if not mine:
        return as_partial(func(**{**given, "reduction": "sum"}) * 0.0)
    mean = func(**given)
    return as_partial(mean if mine * size == whole else mean * (mine * size / whole))


def whole_divisor(target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[float, float]:
    """By what the sum of the losses of this rank's ``target`` is divided to get the mean, and that of all ranks' targets."""
    mine = divisor_of(target, weight, ignore_index)
    return mine, current().between.total(mine)


@torch.no_grad()
def divisor_of(target: Tensor, weight: Tensor | None, ignore_index: int) -> float:
    """By what the sum of the losses of ``target`` is divided to get their mean."""
    counted = target != ignore_index
    return (counted.sum() if weight is None else (weight[torch.where(counted, target, 0).long()] * counted).sum()).item()
