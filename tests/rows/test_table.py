"""Every function of the table gives with rows what it gives with the whole tensor: values, gradients, and gradients of gradients."""

import functools
import math
import random
import re
import warnings
from collections import defaultdict

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import parwrap
from parwrap.rows.layout import Layout, equal_parts
from parwrap.rows.table import kinds
from parwrap.rows.tensors import Partial, Rows, as_rows, collected, current, named

# arguments: a tensor is described by its shape, in which n is the number of rows, and by the numbers in it

KINDS = {
    "real": lambda shape: torch.randn(shape),
    "positive": lambda shape: torch.rand(shape) + 0.3,
    "unit": lambda shape: torch.rand(shape) * 0.8 + 0.1,
    "signed": lambda shape: torch.rand(shape) * 1.8 - 0.9,
    "above": lambda shape: torch.rand(shape) * 2 + 1.1,
    "int": lambda shape: torch.randint(1, 7, shape),
    "index": lambda shape: torch.randint(0, 2, shape),
    "bool": lambda shape: torch.rand(shape) < 0.5,
    "sign": lambda shape: torch.randint(0, 2, shape) * 2.0 - 1,
    "complex": lambda shape: torch.randn(shape, dtype=torch.complex64),
    "gaps": lambda shape: torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, math.nan).masked_fill(torch.rand(shape) < 0.3, math.inf),
    "exact": lambda shape: torch.rand(shape, dtype=torch.float64) + 0.3,
    "holes": lambda shape: torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, math.nan),
    "padded": lambda shape: torch.randint(0, 3, shape).masked_fill(torch.rand(shape) < 0.3, -100),
    "ends": lambda shape: torch.cat([torch.tensor([[1, 0, -1]])] * shape[0]),
}


class Given:
    """A tensor among the arguments of a case: rows, or plain."""

    def __init__(self, shape: str, kind: str = "real", rows: bool = True) -> None:
        self.shape, self.kind, self.rows = shape, kind, rows

    def __repr__(self) -> str:
        kind = "" if self.kind == "real" else f":{self.kind}"
        return f"{'' if self.rows else 'plain '}{self.shape}{kind}"

    def whole(self, n: int) -> Tensor:
        return KINDS[self.kind](tuple(n if each == "n" else int(each) for each in self.shape))


def rows(shape: str, kind: str = "real") -> Given:
    return Given(shape, kind)


def plain(shape: str, kind: str = "real") -> Given:
    return Given(shape, kind, rows=False)


class Case:
    """The arguments of a call."""

    def __init__(self, *args, **kwargs) -> None:
        self.args, self.kwargs = args, kwargs

    def __repr__(self) -> str:
        return ", ".join([*map(str, self.args), *(f"{name}={each}" for name, each in self.kwargs.items())])


def unary(kind, *args, **kwargs):
    return [Case(rows(shape, kind), *args, **kwargs) for shape in ("n3", "3n", "n", "2n3", "n32")]


def binary(x, y=None, number=2.0):
    y = y or x
    return [
        Case(rows("n3", x), number),
        *(Case(rows("n3", x), plain(shape, y)) for shape in ("n3", "3", "n1", "1", "13", "", "2n3")),
        *(Case(rows("3n", x), plain(shape, y)) for shape in ("3n", "n", "31")),
        *(Case(plain(shape, x), rows("n3", y)) for shape in ("n3", "3")),
        Case(rows("n3", x), rows("n3", y)),
        Case(rows("n3", x), rows("n1", y)),
        Case(rows("3n", x), rows("n", y)),
        Case(rows("n1", x), rows("1n", y)),
        Case(rows("n1", x), rows("n", y)),
        Case(rows("n", x), plain("n1", y)),
        Case(rows("n1", x), plain("n", y)),
        Case(rows("2n3", x), rows("n3", y)),
    ]


CASES = defaultdict(list)


def cases(names, *lists):
    for name in names.split():
        for each in lists:
            CASES[name].extend(each if isinstance(each, list) else [each])


cases(
    "neg negative positive abs absolute exp expm1 exp2 square sin cos tan atan arctan sinh cosh tanh asinh sigmoid expit relu relu6 gelu "
    "silu mish elu celu selu leaky_relu softplus softsign hardtanh hardswish hardsigmoid logsigmoid tanhshrink softshrink hardshrink sign "
    "sgn signbit round floor ceil trunc fix frac erf erfc sinc deg2rad rad2deg float double half int long bool bfloat16 short char to cpu "
    "detach clone contiguous logical_not zero_ requires_grad_ __neg__ __pos__ __abs__ conj angle",
    unary("real"),
)
cases("log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma byte", unary("positive"))
cases("asin acos arcsin arccos atanh erfinv", unary("signed"))
cases("logit", unary("unit"), unary("signed", eps=0.1), unary("signed", 0.2))
cases("acosh", unary("above"))
cases("abs neg sign bitwise_not __invert__ __abs__ float square relu", unary("int"))
cases("logical_not bitwise_not __invert__ float", unary("bool"))
cases("isnan isinf isfinite isposinf isneginf nan_to_num", unary("gaps"))
cases("nan_to_num", unary("gaps", 0.5), unary("gaps", nan=1.0, posinf=2.0))
cases("conj angle abs real imag view_as_real exp", unary("complex"))
cases("view_as_complex", Case(rows("n32")), Case(rows("3n2")))
cases("round", unary("real", decimals=1))
cases("elu celu leaky_relu softplus softshrink hardshrink", unary("real", 0.3))
cases("threshold", unary("real", 0.1, 0.7))
cases("hardtanh", unary("real", -0.5, 0.4))
cases("gelu", unary("real", approximate="tanh"))
cases("prelu", [Case(rows("n3"), plain("1")), Case(rows("n3"), plain("3")), Case(rows("n32"), plain("3")), Case(rows("2n3"), plain("1"))])
cases("prelu", Case(rows("2n"), plain("n")))
cases("to", unary("real", torch.float64), unary("real", "cpu"), unary("real", dtype=torch.int64))
cases("type_as", Case(rows("n3"), plain("3", "int")), Case(rows("3n"), rows("n3", "int")), Case(rows("n3"), plain("")))
cases("pin_memory cuda")

cases(
    "add sub subtract mul multiply eq ne lt le gt ge not_equal greater less greater_equal less_equal maximum minimum fmax fmin atan2 "
    "arctan2 copysign hypot logaddexp logaddexp2 heaviside rsub isclose logical_and logical_or logical_xor __rsub__ __radd__ __rmul__ "
    "__add__ __sub__ __mul__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __iadd__ __isub__ __imul__",
    binary("real"),
)
cases(
    "div divide true_divide floor_divide pow float_power remainder fmod xlogy __rdiv__ __rtruediv__ __rfloordiv__ __rpow__ __rmod__ "
    "__truediv__ __div__ __floordiv__ __pow__ __mod__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__",
    binary("positive"),
)
cases("float_power add mul pow", binary("exact"))
cases("add sub mul eq lt remainder floor_divide div __add__ __iadd__ __imul__ __floordiv__ __mod__", binary("int", number=3))
cases("add mul eq", binary("real", "int"), binary("int", "real"))
cases("add sub rsub", Case(rows("n3"), plain("n3"), alpha=2), Case(rows("3n"), rows("3n"), alpha=0.5))
cases("div", Case(rows("n3"), plain("n1"), rounding_mode="floor"))
cases(
    "gcd lcm bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ __rand__ __ror__ __rxor__ __iand__ __ior__ __ixor__",
    binary("int", number=3),
)
cases("bitwise_left_shift bitwise_right_shift __lshift__ __rshift__", binary("int", number=2))
cases("bitwise_and bitwise_or bitwise_xor logical_and logical_or __and__ __or__ __xor__ __ior__ __iand__", binary("bool", number=True))
cases(
    "clamp clip",
    unary("real", -0.5, 0.4),
    unary("real", min=0.1),
    unary("real", max=0.1),
    [Case(rows("n3"), min=plain("n1")), Case(rows("n3"), plain("3"), plain("n3", "positive")), Case(rows("3n"), max=rows("3n"))],
)
cases("clamp_min clamp_max", binary("real"))
cases(
    "where",
    [
        Case(rows("n3", "bool"), rows("n3"), rows("n3")),
        Case(rows("n3", "bool"), plain("n3"), plain("3")),
        Case(rows("n1", "bool"), rows("n3"), 0.0),
        Case(plain("n3", "bool"), 1.0, rows("n3")),
        Case(plain("3", "bool"), rows("n3"), plain("n1")),
        Case(rows("3n", "bool"), plain("n"), 0.0),
        Case(rows("n", "bool"), plain("3n"), plain("31")),
        Case(rows("n", "bool"), plain("n3"), plain("n3")),  # as wide as three rows, where there are
        Case(rows("n3"), rows("n3", "bool"), plain("n3")),
        Case(rows("n3"), plain("n1", "bool"), 0.0),
        Case(plain("n3"), rows("n3", "bool"), rows("n1")),
        Case(rows("n", "bool")),
    ],
)
cases("lerp", [Case(rows("n3"), plain("n3"), 0.3), Case(rows("n3"), rows("n3"), plain("n1")), Case(plain("3"), rows("n3"), rows("n1"))])
cases(
    "addcmul addcdiv",
    [
        Case(rows("n3", "positive"), plain("n3", "positive"), plain("3", "positive"), value=0.5),
        Case(rows("3n", "positive"), rows("n", "positive"), plain("3n", "positive")),
        Case(plain("n3", "positive"), rows("n3", "positive"), rows("n1", "positive")),
    ],
)
cases(
    "masked_fill",
    [
        Case(rows("n3"), rows("n3", "bool"), 0.5),
        Case(rows("n3"), plain("n3", "bool"), -math.inf),
        Case(rows("n3"), rows("n1", "bool"), 0.5),
        Case(rows("3n"), plain("n", "bool"), plain("")),
        Case(rows("n3"), plain("3", "bool"), 0.5),
        Case(plain("n3"), rows("n1", "bool"), 0.5),
    ],
)
cases("polar complex", [Case(rows("n3", "positive"), plain("n3", "positive")), Case(rows("3n", "positive"), rows("3n", "positive"))])
cases("copy_", binary("real"), Case(rows("n3"), plain("n3", "int")), Case(rows("n3"), rows("3n")))
cases("fill_", unary("real", 2.5), Case(rows("n3"), plain("")))
cases(
    "gather",
    [
        Case(rows(x), dim, each(i, "index"))
        for x, i in (("n3", "n2"), ("n3", "n3"), ("3n", "2n"), ("n32", "n22"))
        for dim in (0, 1, -1)
        for each in (rows, plain)
    ],
    Case(plain("n3"), 1, rows("n2", "index")),
    Case(plain("43"), 0, rows("n3", "index")),
    Case(plain("93"), 0, rows("n3", "index")),
    Case(rows("n3"), 0, plain("23", "index")),
)
cases(
    "scatter",
    [Case(rows(x), dim, each(i, "index"), 1.5) for x, i in (("n3", "n2"), ("3n", "2n")) for dim in (0, 1) for each in (rows, plain)],
    Case(plain("n3"), 1, rows("n1", "index"), 1.0),
)
cases(
    "scatter scatter_add",
    [Case(rows("n3"), dim, rows("n2", "index"), each("n2")) for dim in (0, 1) for each in (rows, plain)],
    Case(rows("n3"), 0, plain("23", "index"), plain("23")),
    Case(plain("43"), 0, rows("n3", "index"), rows("n3")),
    Case(plain("93"), 0, rows("n3", "index"), rows("n3")),
    Case(plain("9"), 0, rows("n", "index"), rows("n")),
)
cases(
    "take_along_dim",
    [Case(rows("n3"), each("n2", "index"), dim) for dim in (0, 1) for each in (rows, plain)],
    Case(rows("n3"), rows("n1", "index"), dim=1),
)
cases("take_along_dim", Case(rows("n3"), plain("13", "index"), 0), Case(rows("n3"), plain("4", "index")))
cases("index_fill", Case(rows("3n"), 1, plain("n", "index"), 0.5), Case(rows("n"), 0, plain("n", "index"), 0.5))
cases(
    "index_fill",
    [Case(rows(x), dim, plain("2", "index"), 0.5) for x in ("n3", "3n", "n") for dim in (0, 1)],
    Case(rows("n3"), 0, rows("n", "index"), 0.5),
)

THREE = ("n32", "3n2", "32n", "n3", "3n")
cases(
    "softmax log_softmax",
    [Case(rows(x), dim) for x in THREE for dim in (0, 1, -1)],
    Case(rows("n3"), dim=-1),
    Case(rows("n3"), dim=1, dtype=torch.float64),
)
cases("softmin", [Case(rows(x), dim) for x in THREE for dim in (0, 1, -1)], Case(rows("n3"), dim=-1))
cases(
    "cumsum cumprod cummax cummin logcumsumexp",
    [Case(rows(x), dim) for x in THREE for dim in (0, 1, -1)],
    Case(rows("n3"), dim=1),
    Case(rows("n"), 0),
)
cases("cumsum", Case(rows("n3", "int"), 1), Case(rows("n3", "bool"), 0))
cases(
    "sort argsort",
    [Case(rows(x), *args) for x in THREE for args in ((), (0,), (1,), (-1,), (1, True), (0, True))],
    Case(rows("n3"), dim=1, descending=True),
)
cases("sort argsort", Case(rows("n3", "int"), dim=1, stable=True), Case(rows("n")))
cases(
    "flip",
    [Case(rows(x), dims) for x in THREE for dims in ([0], [1], [0, 1], [-1], (1,))],
    Case(rows("n3"), 1),
    Case(rows("n32"), 1, 2),
    Case(rows("n32"), dims=[2]),
)
cases("glu", [Case(rows(x), *args) for x in ("n4", "4n", "n42") for args in ((), (0,), (1,))], Case(rows("n4"), dim=1))
cases(
    "normalize",
    [Case(rows(x), *args) for x in THREE for args in ((), (2.0, 0), (1.0, 1))],
    Case(rows("n3"), dim=-1),
    Case(rows("n3"), p=1.0, dim=1),
)
cases("gumbel_softmax", [Case(rows(x), *args) for x in ("n3", "3n") for args in ((), (0.5,), (1.0, True))], Case(rows("n3"), dim=0))
cases("topk", [Case(rows(x), 2, *args) for x in ("n3", "3n", "n32") for args in ((), (0,), (1,), (1, False))], Case(rows("n3"), k=2, dim=1))
cases(
    "kthvalue",
    [Case(rows(x), 2, *args) for x in THREE for args in ((), (0,), (1,), (1, True))],
    Case(rows("3n"), k=2, dim=0, keepdim=True),
    Case(rows("3n"), 1, dim=0),
)


def reductions(kind, *before, **kwargs):
    over = ((), (0,), (1,), (-1,), ((0, 1),), ([1, -1],), (0, True), (1, True), ((0, 1), True))
    return [Case(rows(x, kind), *before, *args, **kwargs) for x in ("n32", "3n2", "n3") for args in over] + [
        Case(rows("n", kind), *before, **kwargs),
        Case(rows("3n", kind), *before, dim=0, **kwargs),
        Case(rows("3n", kind), *before, dim=1, keepdim=True, **kwargs),
        Case(rows("n3", kind), *before, dim=-1, keepdim=True, **kwargs),
    ]


cases(
    "sum mean amax amin argmax argmin logsumexp var std nansum nanmean max min median nanmedian aminmax var_mean std_mean norm vector_norm",
    reductions("real"),
)
cases("prod", reductions("positive"), reductions("int"))
cases("sum amax max any all count_nonzero argmax", reductions("int"))
cases("any all sum count_nonzero", reductions("bool"))
cases("nansum nanmean nanmedian", reductions("holes"))
cases("mode", [Case(rows(x, "int"), *args) for x in ("n32", "3n2") for args in ((), (0,), (1,), (0, True))])
cases(
    "sum mean",
    reductions("real", dtype=torch.float64),
    Case(rows("n3", "int"), dtype=torch.float32),
    Case(input=rows("n3")),
    Case(input=rows("n3"), dim=1),
)
cases("sum mean prod amax any std var norm max", Case(rows("n3"), axis=1), Case(rows("n3"), axis=0))
cases(
    "var std var_mean",
    [Case(rows(x), *args) for x in ("n3", "3n") for args in ((0, False), (1, False), (False,), (1, True, True), (True,))],
)
cases("var std var_mean std_mean", [Case(rows(x), dim=dim, correction=0) for x in ("n3", "3n", "n32") for dim in (0, 1, None)])
cases(
    "max min",
    [Case(rows("n3"), each(x)) for each in (rows, plain) for x in ("n3", "n1")]
    + [Case(rows("3n"), plain("n")), Case(plain("n3"), rows("n3"))],
)
cases(
    "norm vector_norm",
    [Case(rows(x), *args) for x in ("n3", "3n", "n32") for args in ((1,), (2, 0), (2, 1), (1, -1, True), (math.inf, 1), (2, (0, 1)))],
)
cases(
    "norm",
    [Case(rows("n3"), p=1, dim=1), Case(rows("n3"), "fro"), Case(rows("n32"), "fro", (1, 2)), Case(rows("n3"), 2, dim=0, keepdim=True)],
)
cases("aminmax", [Case(rows(x), dim=dim, keepdim=keepdim) for x in ("n3", "3n") for dim in (0, 1) for keepdim in (False, True)])

cases(
    "zeros_like ones_like empty_like randn_like rand_like",
    [Case(rows(x)) for x in ("n3", "3n", "n")],
    Case(rows("n3"), dtype=torch.float64),
    Case(input=rows("n3")),
)
cases("full_like", [Case(rows(x), 2.5) for x in ("n3", "3n")], Case(rows("n3"), fill_value=3, dtype=torch.int64))
cases(
    "new_zeros new_ones new_empty",
    Case(rows("n3"), (2, 3)),
    Case(rows("3n"), 4),
    Case(rows("n3"), 2, 3),
    Case(rows("n3", "int"), (2,), dtype=torch.float32),
)
cases("new_full", Case(rows("n3"), (2, 3), 1.5), Case(rows("3n"), (2,), 2.0))

cases(
    "linear",
    [Case(rows(x), plain("53"), plain("5")) for x in ("n3", "2n3", "n23")],
    Case(rows("3n"), plain("5n"), plain("5")),
    Case(rows("n3"), plain("53")),
)
cases("linear", Case(plain("23"), rows("n3"), plain("n")), Case(rows("n3"), plain("53"), bias=plain("5")), Case(rows("n3"), rows("n3")))
cases(
    "bilinear",
    [
        Case(rows("n3"), rows("n4"), plain("534"), plain("5")),
        Case(rows("n3"), plain("n4"), plain("534"), plain("5")),
        Case(rows("n3"), rows("n4"), plain("534"), None),
    ],
)
for d, size in ((1, "6"), (2, "66"), (3, "666")):
    x, w, turned = f"n2{size}", "42" + "3" * d, "24" + "3" * d
    cases(
        f"conv{d}d",
        Case(rows(x), plain(w), plain("4")),
        Case(rows(x), plain(w), None, 2, 1),
        Case(rows(x), plain(w), stride=2),
        Case(rows(f"2n{size}"), plain("4n" + "3" * d)),
    )
    cases(f"conv_transpose{d}d", Case(rows(x), plain(turned), plain("4")), Case(rows(x), plain(turned), None, 2))
    cases(
        f"max_pool{d}d avg_pool{d}d",
        Case(rows(x), 2),
        Case(rows(x), kernel_size=3, stride=1),
        Case(rows(f"2n{size}"), 2),
        Case(rows(f"n{size}"), 2),
    )
    cases(
        f"adaptive_avg_pool{d}d adaptive_max_pool{d}d",
        Case(rows(x), 3),
        Case(rows(x), (3,) * d),
        Case(rows(f"2n{size}"), 2),
        Case(rows(f"n{size}"), 2),
    )
    cases(f"adaptive_max_pool{d}d", Case(rows(x), 2, return_indices=True))
    cases(f"lp_pool{d}d", Case(rows(x, "positive"), 2, 2), Case(rows(f"n{size}", "positive"), 2, 2))
cases("max_pool1d max_pool2d", Case(rows("n266"), 2, return_indices=True))
cases(
    "interpolate upsample",
    Case(rows("n244"), scale_factor=2),
    Case(rows("n244"), size=(3, 3), mode="bilinear"),
    Case(rows("n24"), 8),
    Case(rows("2n4"), 8),
)
cases(
    "pad",
    [Case(rows(x), *args) for x in ("n3", "3n", "n32", "3n2") for args in (([1, 2],), ([1, 2], "constant", 1.5), ([1, 0, 0, 1],))],
    Case(rows("n34"), (1, 1), mode="reflect"),
)
cases("pad", Case(rows("n"), (0, 1)), Case(rows("n344"), (1, 1, 1, 1), "circular"))
cases(
    "embedding",
    Case(rows("n3", "index"), plain("43")),
    Case(rows("3n", "index"), plain("43")),
    Case(rows("n", "index"), plain("43")),
    Case(plain("43"), rows("n3", "index")),
)
cases(
    "embedding",
    Case(rows("n3", "index"), plain("43"), padding_idx=1),
    Case(plain("4", "index"), rows("n3")),
    Case(rows("n3"), plain("5", "index")),
    Case(rows("n", "index"), rows("n3")),
)
cases(
    "layer_norm rms_norm",
    [Case(rows(x), (3,)) for x in ("n3", "2n3", "n23")],
    Case(rows("n3"), (3,), plain("3")),
    Case(rows("n23"), [2, 3]),
)
cases("layer_norm", Case(rows("n3"), (3,), plain("3"), plain("3")), Case(rows("n3"), normalized_shape=(3,), eps=0.1))
cases("group_norm", Case(rows("n43"), 2), Case(rows("n4"), 2, plain("4"), plain("4")), Case(rows("4n3"), 1), Case(rows("n433"), 4, eps=0.1))
cases("instance_norm", Case(rows("n43")), Case(rows("n433")), Case(rows("4n3")), Case(rows("n43"), None, None, plain("4"), plain("4")))
cases("instance_norm", Case(rows("n43"), None, None, None, None, True, 0.1, 1e-5, False))
cases(
    "unfold",
    Case(rows("n244"), 2),
    Case(rows("n244"), (2, 2), stride=2),
    Case(rows("n6"), 1, 2, 2),
    Case(rows("6n"), 0, 2, 2),
    Case(rows("n6"), 0, 2, 1),
    Case(rows("n62"), 1, 3, 2),
    Case(rows("n6"), dimension=1, size=2, step=2),
)
cases("unfold", Case(rows("n344"), 1, 2, 2), Case(rows("n344"), 0, 2, 1))
cases("fold", Case(rows("n89"), (4, 4), (2, 2)), Case(rows("n84"), (4, 4), 2, stride=2))
cases(
    "grid_sample",
    Case(rows("n244"), rows("n332", "signed"), align_corners=False),
    Case(rows("n244"), plain("n332", "signed"), align_corners=True),
    Case(plain("n244"), rows("n332", "signed"), align_corners=True),
)
cases("affine_grid", Case(rows("n23"), ("n", 2, 3, 3), align_corners=False))
cases("pixel_shuffle", Case(rows("n433"), 2), Case(rows("24n3"), 2))
cases("pixel_unshuffle", Case(rows("n244"), 2), Case(rows("2n44"), 2))
cases("channel_shuffle", Case(rows("n443"), 2), Case(rows("n44"), 2))
cases("local_response_norm", Case(rows("n433"), 2), Case(rows("n43"), 3))
cases(
    "pairwise_distance",
    Case(rows("n3"), rows("n3")),
    Case(rows("n3"), plain("n3")),
    Case(rows("n3"), plain("3")),
    Case(rows("n3"), rows("n3"), 1.0),
    Case(rows("3n"), rows("3n")),
    Case(rows("n"), rows("n")),
    Case(rows("n23"), rows("n23"), keepdim=True),
)
cases(
    "scaled_dot_product_attention",
    Case(rows("n43"), rows("n53"), rows("n53")),
    Case(rows("n243"), rows("n243"), rows("n243"), is_causal=True),
    Case(rows("n43"), plain("n53"), plain("n53")),
    Case(rows("n3"), rows("n3"), rows("n3")),
)
cases(
    "scaled_dot_product_attention",
    Case(rows("n43"), rows("n43"), rows("n43"), attn_mask=plain("44", "bool")),
    Case(rows("n43"), rows("n43"), rows("n43"), attn_mask=rows("n44")),
    Case(rows("n43"), rows("n43"), rows("n43"), rows("n44")),
)
cases(
    "scaled_dot_product_attention",
    Case(rows("n243"), rows("n243"), rows("n243"), attn_mask=rows("n44")),
    Case(rows("2n3"), rows("2n3"), rows("2n3")),
)

REDUCED = ({}, {"reduction": "sum"}, {"reduction": "none"})


def losses(*tensors, **kwargs):
    return [Case(*tensors, **reduction, **kwargs) for reduction in REDUCED]


cases(
    "mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss poisson_nll_loss binary_cross_entropy_with_logits",
    losses(rows("n3"), plain("n3", "unit")),
    losses(rows("n3"), rows("n3", "unit")),
    losses(rows("3n"), rows("3n", "unit")),
    losses(rows("3n"), plain("3n", "unit")),
    losses(rows("n"), plain("n", "unit")),
    losses(plain("n3"), rows("n3", "unit")),
    losses(rows("n32"), rows("n32", "unit")),
)
for number in (0, 1, 2):  # torch's own have numbers for "none", "mean", "sum"
    cases("kl_div", Case(rows("n3"), plain("n3", "unit"), number))
    cases("poisson_nll_loss", Case(rows("n3"), plain("n3", "unit"), True, False, 1e-8, number))
    cases("hinge_embedding_loss", Case(rows("n3"), plain("n3", "sign"), 1.0, number))
    cases("binary_cross_entropy_with_logits", Case(rows("n3"), plain("n3", "unit"), None, None, number))
    cases("triplet_margin_loss", Case(rows("n3"), rows("n3"), rows("n3"), 1.0, 2.0, 1e-6, False, number))
    cases("margin_ranking_loss", Case(rows("n"), rows("n"), rows("n", "sign"), 0.1, number))
    cases("cosine_embedding_loss", Case(rows("n3"), rows("n3"), rows("n", "sign"), 0.1, number))
cases(
    "mse_loss l1_loss smooth_l1_loss",
    losses(rows("n3"), plain("3")),
    losses(rows("n3"), rows("n1")),
    losses(rows("n1"), rows("n")),
    Case(rows("n3"), plain("n3"), None, None, "mean"),
)
cases("mse_loss l1_loss", Case(rows("n3"), plain("n3"), size_average=False), losses(rows("n3"), plain("2n3")))
cases(
    "mse_loss",
    losses(rows("n3"), plain("n3"), weight=rows("n3", "positive")),
    losses(rows("n3"), rows("n3"), weight=plain("3", "positive")),
)
cases(
    "binary_cross_entropy",
    losses(rows("n3", "unit"), plain("n3", "unit")),
    losses(rows("n", "unit"), rows("n", "unit")),
    losses(rows("n3", "unit"), rows("n3", "unit"), weight=plain("3", "positive")),
)
cases(
    "binary_cross_entropy_with_logits",
    losses(rows("n3"), plain("n3", "unit"), pos_weight=plain("3", "positive")),
    losses(rows("n3"), rows("n3", "unit"), weight=rows("n3", "positive")),
)
cases(
    "kl_div",
    [
        Case(rows("n3"), rows("n3", "unit"), reduction="batchmean"),
        Case(rows("n3"), plain("n3", "unit"), reduction="batchmean"),
        Case(rows("3n"), rows("3n", "unit"), reduction="batchmean"),
    ],
)
cases("kl_div", losses(rows("n3"), rows("n3"), log_target=True))
cases(
    "gaussian_nll_loss",
    losses(rows("n3"), rows("n3"), rows("n3", "positive")),
    losses(rows("n3"), plain("n3"), plain("n1", "positive")),
    losses(rows("n3"), plain("n3"), rows("n", "positive")),
    losses(rows("n"), rows("n"), rows("n", "positive"), full=True),
)
cases(
    "triplet_margin_loss triplet_margin_with_distance_loss",
    losses(rows("n3"), rows("n3"), rows("n3")),
    losses(rows("n3"), plain("n3"), rows("n3")),
    losses(rows("n3"), rows("n3"), rows("n3"), swap=True),
)
cases(
    "margin_ranking_loss",
    losses(rows("n"), rows("n"), rows("n", "sign")),
    losses(rows("n"), plain("n"), plain("n", "sign"), margin=0.3),
    losses(rows("n3"), rows("n3"), plain("n3", "sign")),
)
cases(
    "cosine_embedding_loss",
    losses(rows("n3"), rows("n3"), rows("n", "sign")),
    losses(rows("n3"), rows("n3"), plain("n", "sign")),
    losses(rows("n3"), plain("n3"), rows("n", "sign"), margin=0.1),
)
cases("hinge_embedding_loss", losses(rows("n3"), rows("n3", "sign")), losses(rows("n"), plain("n", "sign")))
cases(
    "multi_margin_loss",
    losses(rows("n3"), rows("n", "index")),
    losses(rows("n3"), plain("n", "index")),
    losses(rows("n3"), rows("n", "index"), weight=plain("3", "positive")),
)
cases("multilabel_margin_loss", losses(rows("n3"), rows("n3", "ends")), losses(rows("n3"), plain("n3", "ends")))
cases(
    "multilabel_soft_margin_loss",
    losses(rows("n3"), rows("n3", "unit")),
    losses(rows("n3"), plain("n3", "unit")),
    losses(rows("n3"), plain("n3", "unit"), weight=plain("3", "positive")),
)
cases(
    "cross_entropy nll_loss",
    losses(rows("n3"), rows("n", "index")),
    losses(rows("n3"), plain("n", "index")),
    losses(rows("n3"), rows("n", "padded")),
    losses(rows("n3"), plain("n", "padded")),
    losses(rows("n3"), rows("n", "index"), weight=plain("3", "positive")),
    losses(rows("n3"), rows("n", "index"), ignore_index=1),
    losses(rows("n34"), rows("n4", "padded")),
    losses(rows("n344"), plain("n44", "padded"), weight=plain("3", "positive")),
    losses(plain("n3"), rows("n", "index")),
    [Case(rows("n3"), rows("n", "padded"), plain("3", "positive")), Case(input=rows("n3"), target=rows("n", "index"))],
)
cases(
    "cross_entropy",
    losses(rows("n3"), rows("n3", "unit")),
    losses(rows("n3"), plain("n3", "unit"), weight=plain("3", "positive")),
    losses(rows("n3"), rows("n", "padded"), label_smoothing=0.1),
)
cases(
    "cross_entropy",
    losses(rows("n3"), rows("n", "padded"), label_smoothing=0.1, weight=plain("3", "positive")),
    losses(rows("3n"), plain("3", "index")),
)

for shape, targets in {
    "n34": [(-1,), (-1, 4), ("n", -1), ("n", 12), ("3n", 4), ("n", 2, 6), ("n", 3, 2, 2), (1, "n", 12), (3, "4n"), (2, -1)],
    "3n4": [(3, -1), (3, "4n"), (-1, 4), (3, "n", 2, 2), ("3n", 4), (-1,), ("n", 12)],
    "n": [("n", 1), (1, "n"), (-1,), (1, "n", 1), (-1, 1)],
    "n22": [("2n", 2), ("4n",), ("n", 4)],
}.items():
    for target in targets:
        cases("view reshape", Case(rows(shape), target), *([Case(rows(shape), *target)] if target[0] == -1 else []))
cases("reshape", Case(rows("n3"), shape=(-1,)))
cases("view", Case(rows("n3"), torch.int32), Case(rows("n4"), torch.float64), Case(rows("n4"), dtype=torch.int16))
cases(
    "view_as reshape_as expand_as",
    Case(rows("n6"), plain("n23")),
    Case(rows("n6"), rows("n23")),
    Case(rows("n3"), plain("2n3")),
    Case(rows("n1"), rows("n3")),
    Case(rows("1n"), plain("3n")),
    Case(rows("n3"), rows("n3")),
)
cases(
    "flatten",
    [Case(rows(x), *args) for x in ("n32", "3n2", "32n", "n", "n3") for args in ((), (1,), (0, 1), (1, 2), (-2,))],
    Case(rows("n32"), start_dim=1),
    Case(rows("3n2"), end_dim=1),
)
cases("ravel", Case(rows("n32")), Case(rows("3n")), Case(rows("n")))
cases(
    "unflatten",
    [Case(rows(x), dim, sizes) for x in ("n6", "6n") for dim in (0, 1, -1) for sizes in ((2, 3), (-1, 2), (1, -1))],
    Case(rows("n6"), dim=1, sizes=(3, 2)),
    Case(rows("n4"), 0, (2, 2)),
)
cases(
    "squeeze",
    [Case(rows(x), *args) for x in ("n13", "1n", "n1", "1n1", "n3", "13n") for args in ((), (0,), (1,), (-1,), ((0, 1),))],
    Case(rows("n13"), dim=1),
)
cases("unsqueeze", [Case(rows(x), dim) for x in ("n3", "3n", "n") for dim in (0, 1, 2, -1, -2)], Case(rows("n3"), dim=1))
cases(
    "permute",
    [Case(rows(x), order) for x in ("n32", "3n2") for order in ((0, 2, 1), (1, 0, 2), (2, 1, 0), (-1, 0, 1))],
    Case(rows("n32"), 1, 2, 0),
    Case(rows("n3"), dims=(1, 0)),
)
cases("transpose swapaxes swapdims", [Case(rows(x), a, b) for x in ("n32", "3n2") for a, b in ((0, 1), (1, 2), (-1, 0), (1, 1))])
cases("transpose", Case(rows("n3"), dim0=0, dim1=1), Case(rows("n3"), 0, dim1=1))
cases("t", Case(rows("n3")), Case(rows("3n")), Case(rows("n")))
cases(
    "movedim moveaxis",
    [Case(rows(x), a, b) for x in ("n32", "3n2") for a, b in ((0, 1), (-1, 0), ((0, 1), (1, 2)), ([2, 0], [0, 1]))],
    Case(rows("n32"), source=0, destination=-1),
)
cases(
    "expand",
    Case(rows("n1"), "n", 4),
    Case(rows("n1"), ("n", 4)),
    Case(rows("n1"), -1, 4),
    Case(rows("n3"), 2, "n", 3),
    Case(rows("1n"), 3, -1),
    Case(rows("n"), 2, "n"),
    Case(rows("n"), (3, -1)),
)
cases(
    "repeat tile",
    Case(rows("n3"), 2, 1),
    Case(rows("n3"), (1, 2)),
    Case(rows("n3"), 2, 3),
    Case(rows("n3"), (2, 1, 1)),
    Case(rows("3n"), 2, 2),
    Case(rows("n"), 3),
    Case(rows("n3"), (0, 1)),
)
cases("tile", Case(rows("n3"), (2,)), Case(rows("n32"), (2, 1)), Case(rows("n3"), dims=(2, 1)))
cases(
    "repeat_interleave",
    [Case(rows(x), 2, *args) for x in ("n3", "3n", "n") for args in ((), (0,), (1,))],
    Case(rows("n3"), plain("n", "index"), 0),
    Case(rows("n3"), plain("3", "int"), dim=1),
    Case(rows("n3"), rows("n", "index"), dim=0),
    Case(rows("n3"), repeats=3, dim=0),
)
cases("repeat_interleave", Case(rows("n", "int")), Case(rows("n3"), 0, 0), Case(rows("n3"), 2, dim=-1))
cases(
    "select",
    [Case(rows(x), dim, at) for x in ("n3", "3n", "n32") for dim in (0, 1, -1) for at in (0, 1, -1)],
    Case(rows("n3"), dim=1, index=0),
)
cases(
    "narrow",
    [Case(rows(x), dim, 0, 2) for x in ("n3", "3n", "n32") for dim in (0, 1, -1)],
    Case(rows("n3"), 1, -2, 1),
    Case(rows("n3"), dim=1, start=1, length=2),
    Case(rows("n3"), 1, plain("", "index"), 1),
)
cases(
    "index_select",
    [Case(rows(x), dim, plain("4", "index")) for x in ("n3", "3n") for dim in (0, 1, -1)],
    Case(rows("n3"), 0, rows("n", "index")),
    Case(plain("43"), 0, rows("n", "index")),
    Case(rows("n3"), dim=1, index=plain("2", "index")),
)
cases("index_select", Case(rows("n3"), 1, rows("n", "index")), Case(plain("43"), 1, rows("n", "index")))
cases(
    "roll",
    [Case(rows(x), *args) for x in ("n3", "3n") for args in ((1,), (1, 0), (-1, 1), ((1, 1), (0, 1)))],
    Case(rows("n3"), shifts=1, dims=1),
)

BESIDE = named(
    "cat concat concatenate stack chunk split unbind tensor_split matmul mm bmm mv __matmul__ __rmatmul__ one_hot cosine_similarity "
    "cross_entropy nll_loss dropout alpha_dropout feature_dropout batch_norm __getitem__ __setitem__"
)
"""Functions with handlers of their own, which ``kinds`` does not name."""

PAIRS = [
    [rows("n3"), rows("n3")],
    [rows("n3"), plain("n3")],
    [rows("3n"), plain("3n")],
    [plain("n3"), rows("n3"), rows("n3")],
    [rows("n"), rows("n")],
    [rows("3n"), rows("3n")],
]
cases(
    "cat concat concatenate stack",
    [Case(pair, *args) for pair in PAIRS for args in ((), (0,), (1,), (-1,))],
    Case([rows("n3"), plain("23")]),
    Case((rows("n3"), rows("n2")), dim=1),
    Case([rows("n3"), plain("n2")], axis=-1),
)
cases(
    "chunk",
    [Case(rows(x), k, *args) for x in ("n4", "4n") for k in (1, 2, 3) for args in ((), (1,), (-1,))],
    Case(rows("n4"), chunks=2, dim=1),
)
cases(
    "split tensor_split",
    [Case(rows(x), k, *args) for x in ("n4", "4n") for k in (2, 3) for args in ((), (1,), (-1,))],
    Case(rows("n4"), [1, 3], 1),
    Case(rows("n4"), [2, 2], dim=-1),
)
cases(
    "split",
    Case(rows("n4"), split_size_or_sections=2, dim=1),
    Case(rows("n4"), split_size_or_sections=2),
    Case(rows("n4"), [3, 2]),
    Case(rows("n4"), [2, 2]),
)
cases("unbind", [Case(rows(x), *args) for x in ("n3", "3n") for args in ((), (1,))], Case(rows("n3"), dim=-1))
cases(
    "matmul mm bmm mv __matmul__ __rmatmul__",
    [
        Case(first, other)
        for shape, of in {
            "n3": [rows("3n"), plain("34"), plain("3"), plain("3n"), plain("234")],
            "3n": [rows("n3"), rows("n"), plain("n4"), plain("n"), plain("3")],
            "n23": [rows("n34"), plain("n34"), plain("34"), plain("3"), plain("134")],
            "2n3": [rows("23n"), plain("34"), plain("234"), plain("3")],
            "23n": [rows("2n3"), rows("n3"), rows("n")],
            "n": [rows("n"), rows("n3"), plain("n3"), plain("n")],
            "23": [rows("3n")],
            "3": [rows("3n")],
            "13": [rows("3n")],
        }.items()
        for other in of
        for first in ([rows(shape)] if "n" in shape else []) + [plain(shape)]
        if first.rows or other.rows
    ],
)
cases("__rmatmul__", Case(rows("3n"), rows("n3")), Case(rows("3n"), plain("23")), Case(rows("n3"), plain("2n")))
cases(
    "one_hot", Case(rows("n", "index")), Case(rows("n", "index"), 3), Case(rows("n3", "index"), 4), Case(rows("3n", "index"), num_classes=3)
)
cases(
    "cosine_similarity",
    Case(rows("n3"), rows("n3")),
    Case(rows("n3"), plain("n3")),
    Case(rows("3n"), rows("3n"), 0),
    Case(rows("3n"), rows("3n")),
    Case(rows("n3"), rows("n3"), dim=-1),
    Case(rows("n13"), rows("1n3"), dim=-1),
    Case(rows("n3"), plain("3"), -1),
)
cases(
    "dropout alpha_dropout feature_dropout",
    Case(rows("n34"), 0.5, True),
    Case(rows("n34"), p=0.5, train=True),
    Case(rows("n34"), 0.5, training=True),
    Case(rows("n34"), 0.5, False),
    Case(rows("3n"), 0.5, True),
    Case(rows("n34")),
)
cases(
    "batch_norm",
    Case(rows("n3"), plain("3"), plain("3", "positive")),
    Case(rows("n3"), plain("3"), plain("3", "positive"), plain("3"), plain("3"), True, 0.1),
    Case(rows("n3"), None, None, training=True),
)
cases(
    "batch_norm",
    Case(rows("n3"), plain("3"), plain("3"), plain("3"), plain("3", "positive"), False, 0.1, 1e-5, False),
    Case(rows("n3"), None, None, None, None, True, 0.1, 1e-5, False),
)

every = slice(None)
PARTS = [
    Case(rows("n3"), 0),
    Case(rows("n3"), -1),
    Case(rows("n3"), every),
    Case(rows("n3"), slice(1, 3)),
    Case(rows("n3"), slice(None, None, 2)),
    Case(rows("n3"), slice(0, 2)),
    Case(rows("n3"), (every, 1)),
    Case(rows("n3"), (every, -1)),
    Case(rows("n3"), (every, slice(0, 2))),
    Case(rows("n3"), (every, None)),
    Case(rows("n3"), None),
    Case(rows("n3"), ...),
    Case(rows("n3"), (..., 0)),
    Case(rows("n3"), (..., None)),
    Case(rows("n3"), (1, 2)),
    Case(rows("n3"), (every, [0, 2])),
    Case(rows("n3"), (every, [True, False, True])),
    Case(rows("n3"), (every, plain("2", "index"))),
    Case(rows("n3"), (every, plain("22", "index"))),
    Case(rows("n3"), (every, plain("3", "bool"))),
    Case(rows("n3"), [0, 1]),
    Case(rows("n3"), plain("2", "index")),
    Case(rows("n3"), rows("n", "index")),
    Case(rows("n3"), plain("", "index")),
    Case(rows("n3"), (rows("n", "index"), rows("n", "index"))),
    Case(rows("n3"), (plain("n", "index"), plain("n", "index"))),
    Case(rows("n3"), rows("n", "bool")),
    Case(rows("n3"), plain("n", "bool")),
    Case(rows("n3"), rows("n3", "bool")),
    Case(rows("n3"), plain("n3", "bool")),
    Case(rows("n3"), True),
    Case(rows("n32"), (every, 1, slice(0, 1))),
    Case(rows("n32"), (..., [1, 0], every)),
    Case(rows("n32"), (every, [1, 0], 0)),
    Case(rows("n32"), (every, 0, [1, 0])),
    Case(rows("n32"), (0, every, [1, 0])),
    Case(rows("n32"), (every, None, [1, 0])),
    Case(rows("n32"), (rows("n", "bool"), 0)),
    Case(rows("n32"), (every, 0, plain("2", "index"))),
    Case(rows("3n"), 0),
    Case(rows("3n"), (every, 0)),
    Case(rows("3n"), [0, 2]),
    Case(rows("3n"), plain("2", "index")),
    Case(rows("3n"), plain("3", "bool")),
    Case(rows("3n"), plain("3n", "bool")),
    Case(rows("3n"), (every, rows("n", "bool"))),
    Case(rows("3n"), (every, slice(1, None))),
    Case(rows("3n"), (plain("3", "index"), every)),
    Case(rows("23n"), (0, [0, 1])),
    Case(rows("23n"), (0, every, [0, 1])),
    Case(rows("23n"), ([0, 1], 0)),
    Case(rows("23n"), ([0, 1], every, None)),
    Case(rows("n"), 0),
    Case(rows("n"), slice(None, -1)),
    Case(rows("n"), rows("n", "bool")),
    Case(plain("43"), rows("n", "index")),
    Case(plain("43"), rows("n3", "index")),
    Case(plain("4"), rows("3n", "index")),
    Case(plain("n3"), rows("n", "bool")),
    Case(plain("n3"), rows("n3", "bool")),
    Case(plain("3n"), (every, rows("n", "bool"))),
    Case(plain("43"), (rows("n", "index"), rows("n", "index"))),
]
cases("__getitem__", PARTS, Case(rows("n3"), (torch.arange, plain("n", "index"))), Case(rows("n3"), (torch.arange, rows("n", "index"))))
cases("__setitem__", [Case(*part.args, 0.5) for part in PARTS])
cases(
    "__setitem__",
    Case(rows("n3"), every, plain("n3")),
    Case(rows("n3"), (every, 0), plain("n")),
    Case(rows("n3"), (every, 0), rows("n")),
    Case(rows("n3"), (every, 0), plain("")),
    Case(rows("n3"), (every, slice(0, 2)), plain("2")),
    Case(rows("n3"), (every, slice(0, 2)), plain("n1")),
    Case(rows("n3"), (every, slice(0, 2)), rows("n2")),
    Case(rows("n3"), (every, [0, 2]), plain("n2")),
    Case(rows("n3"), ..., plain("3")),
    Case(rows("n3"), rows("n", "bool"), plain("3")),
    Case(rows("n3"), rows("n", "bool"), plain("")),
    Case(rows("n3"), slice(0, 2), plain("23")),
    Case(rows("n3"), 1, plain("3")),
    Case(rows("3n"), 1, rows("n")),
    Case(rows("3n"), 1, plain("n")),
    Case(rows("3n"), (every, 1), plain("3")),
    Case(rows("3n"), [0, 1], rows("2n")),
    Case(rows("3n"), every, plain("31")),
    Case(plain("3n"), 1, rows("n")),
    Case(plain("n3"), (every, 1), rows("n")),
    Case(rows("n3"), (every, 0), plain("n", "int")),
    Case(rows("n32"), (every, 0), rows("n2")),
    Case(rows("n32"), (every, every, 1), rows("n3")),
)

NO_FUNCTION: set[str] = set()
"""Names that torch has no function for."""

NEEDS_GPU = {"cuda", "pin_memory"}
NO_NUMBERS = {"empty_like", "new_empty"}
NO_GRADIENT_OF_NO_ROWS = {"scaled_dot_product_attention", "pixel_shuffle"}
"""Functions of which torch has no gradient, or one of a wrong shape, if there are no samples, as on a rank without rows."""


def filled(arg, n, tensor):
    """``arg`` with tensors for what describes them, and numbers for "n" and its multiples."""
    if isinstance(arg, Given):
        return tensor(arg)
    if type(arg) in (tuple, list):
        return type(arg)(filled(each, n, tensor) for each in arg)
    if arg is torch.arange:
        return torch.arange(n)
    if isinstance(arg, str) and arg[-1:] == "n" and (arg == "n" or arg[:-1].isdigit()):
        return n * int(arg[:-1] or 1)
    return arg


OWNERS = {"Tensor": Tensor, "torch": torch, "F": F, "special": torch.special, "linalg": torch.linalg}


def forms(name):
    """Where a function of this name is, also the one that works in place."""
    found = {}
    for owner, place in OWNERS.items():
        for each in (name, f"{name}_"):
            if each.startswith("__") and (place is not Tensor or each.endswith("___")):
                continue
            if callable(getattr(place, each, None)):
                found[f"{owner}.{each}"] = (place, each)
    return found


def layouts(rank, size):
    """How rows may lie on the ranks."""
    return {
        "uneven": equal_parts(2 * size + 1, rank, size),
        "even": equal_parts(2 * size, rank, size),
        "segments": equal_parts(size + 1, rank, size).after([equal_parts(size, rank, size)]),
        "as many as features": equal_parts(3, rank, size),
        "a rank without": Layout(((2, *[0] * (size - 1)),), rank),
    }


def alike(a, b):
    """Whether two tensors are equal up to rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype == torch.bool or not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    finite = b[b.isfinite()].abs()
    size = 1 + float(finite.max()) if finite.numel() else 1.0
    rough = a.dtype in (torch.half, torch.bfloat16)
    return torch.allclose(a, b, rtol=1e-2 if rough else 2e-4, atol=(1e-3 if rough else 1e-5) * size, equal_nan=True)


def differ(found, expected, numbers=True):
    """What is wrong with ``found``: it should be ``expected``, or this rank's rows of it. No rank waits for another to see it."""
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor):
            return f"{found!r}, not a tensor"
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return f"{found.dtype} {tuple(found.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        if not numbers or isinstance(found, Partial):
            return None
        if isinstance(found, Rows):
            if found.row_layout.n != expected.shape[found.row_dim]:
                return f"rows in dimension {found.row_dim}"
            expected = found.row_layout.own(expected, found.row_dim)
        found, expected = plain_of(found), expected.detach()
        return None if alike(found, expected) else f"{brief(found)}, expected {brief(expected)}"
    if isinstance(expected, (tuple, list)):
        if not isinstance(found, (tuple, list)) or len(found) != len(expected):
            return f"{found!r}"
        return next((f"[{i}]: {wrong}" for i, each in enumerate(expected) if (wrong := differ(found[i], each, numbers))), None)
    same = math.isclose(found, expected, rel_tol=2e-4, abs_tol=2e-5) if isinstance(expected, float) else found == expected
    return (
        None
        if type(found) is type(expected) and (same or (found != found and expected != expected))
        else f"{found!r}, expected {expected!r}"
    )


def plain_of(tensor):
    """What this rank holds."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(Tensor)


def brief(tensor):
    return str(tensor.tolist())[:100]


class Means:
    """Parts of means over ranks, which are compared at last and together, so that no rank waits where another has failed."""

    def __init__(self) -> None:
        self.parts, self.expected, self.names = [], [], []

    def add(self, name, found, expected):
        if not isinstance(expected, Tensor):
            return
        expected = expected.detach()
        mine = plain_of(found) if isinstance(found, Partial) and found.shape == expected.shape else torch.full_like(expected, 0)
        is_mean = isinstance(found, Partial) and found.shape == expected.shape
        self.parts.append(torch.cat([torch.tensor([float(is_mean)], dtype=torch.float64), mine.reshape(-1).to(torch.complex128).real]))
        self.expected.append(expected.reshape(-1).to(torch.complex128).real)
        self.names.append(name)

    def problems(self):
        between, at, problems = current().between, 0, []
        if not self.parts:
            return problems
        means = between.summed(torch.cat(self.parts)) / between.size
        for name, expected in zip(self.names, self.expected, strict=True):
            flag, mean = means[at], means[at + 1 : at + 1 + len(expected)]
            at += 1 + len(expected)
            if flag == 1 and not torch.allclose(mean, expected, rtol=2e-4, atol=2e-5, equal_nan=True):
                problems.append(f"{name}: a mean over ranks {brief(mean)}, expected {brief(expected)}")
            elif 0 < flag < 1:
                problems.append(f"{name}: a mean over ranks on some ranks only")
        return problems


class Both:
    """The tensors of a case, whole and as rows."""

    def __init__(self, case, layout) -> None:
        self.case, self.layout = case, layout
        n = layout.n
        torch.default_generator.manual_seed(0)
        self.wholes = {}
        filled([*case.args, *case.kwargs.values()], n, lambda given: self.wholes.setdefault(id(given), []).append(given.whole(n)))

    def _filled(self, made):
        tensors = {each: iter(found) for each, found in self.wholes.items()}

        def tensor(given):
            return made(given, next(tensors[id(given)]))

        args = filled(self.case.args, self.layout.n, tensor)
        return args, {name: filled(each, self.layout.n, tensor) for name, each in self.case.kwargs.items()}

    def whole(self, leaves=None):
        def made(given, whole):
            mine = whole.clone()
            if leaves is not None and mine.is_floating_point():
                leaves.append(mine.requires_grad_())
            return mine

        return self._filled(made)

    def rows(self, leaves=None):
        def made(given, whole):
            if given.rows:
                dim = given.shape.index("n")
                mine = as_rows(self.layout.own(whole, dim).clone(), self.layout, dim)
            else:
                mine = whole.clone()
            if leaves is not None and whole.is_floating_point():
                mine.requires_grad_()
                leaves.append(mine)
            return mine

        return self._filled(made)


def call(place, name, args, kwargs):
    torch.default_generator.manual_seed(1)  # torch.manual_seed takes 20 times as long
    return getattr(place, name)(*args, **kwargs)


def problems_of(form, both, means, at):
    """What is wrong with the values of a call; ``None`` if torch itself takes no such arguments."""
    place, name = form
    args, kwargs = both.whole()
    try:
        expected = call(place, name, args, kwargs)
    except Exception:
        return None
    given, given_kwargs = both.rows()
    try:
        found = call(place, name, given, given_kwargs)
    except Exception as error:
        means.add(at, None, expected)
        return [f"{type(error).__name__}: {error}"[:300]]
    means.add(at, found, expected)
    wrong = [differ(found, expected, name not in NO_NUMBERS)]
    if isinstance(given[0] if given else None, Tensor):
        wrong.append((after := differ(given[0], args[0])) and f"afterwards the first argument is {after}")
    return [each for each in wrong if each]


WRONG: dict[str, str] = {}
"""What is wrong today: which calls, and why."""


ANY_WRONG = re.compile("|".join(WRONG) or "(?!)")


def known(at):
    """Which rule of ``WRONG`` tells of a call."""
    return next((rule for rule in WRONG if re.search(rule, at)), None) if ANY_WRONG.search(at) else None


def ways_of(case, all_ways=False):
    """The layouts to try for a case: an uneven one, or one of the others, in turns."""
    between = current().between
    ways = list(layouts(between.rank, between.size).items())
    return ways if all_ways else [[ways[0], *ways][sum(map(ord, str(case))) % (len(ways) + 1)]]


def values(names, all_ways=False, of=None):
    """What is wrong with functions of these names, in any form; without what is known, or with one rule of it only."""
    problems = []
    for name in names:
        tried, means = {}, Means()
        for case in CASES[name]:
            for way, layout in ways_of(case, all_ways):
                here = {f"{form}({case}) {way}": form for form in forms(name)}
                tried.update({form: True for at, form in here.items() if known(at)})
                here = {at: form for at, form in here.items() if known(at) == of}
                both = Both(case, layout) if here else None
                for at, form in here.items():
                    wrong = problems_of(forms(name)[form], both, means, at)
                    tried[form] = tried.get(form, False) or wrong is not None
                    problems += [f"{at}: {each}" for each in wrong or ()]
        problems += means.problems()
        if of is None and name not in NEEDS_GPU | NO_FUNCTION:
            problems += [f"no case for {form}" for form in forms(name) if not tried.get(form)]
            problems += [] if forms(name) else [f"no function {name}"]
    return problems


def groups(most=40):
    """The names of the table, in groups of which each takes seconds."""
    for kind, names in {**kinds(), "beside": BESIDE}.items():
        for start in range(0, len(names), most):
            yield pytest.param(names[start : start + most], id=f"{kind} {start // most}" if len(names) > most else kind)


def check_values(names, all_ways=False):
    with warnings.catch_warnings(), parwrap.distributed(batch="whole"):
        warnings.simplefilter("ignore")
        problems = values(names, all_ways)

    assert not problems, "\n".join(problems)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("names", list(groups()))
def test_values_are_those_of_the_whole(names):
    check_values(names)


@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize("names", list(groups(10)))
def test_values_are_those_of_the_whole_however_rows_lie_on_three_ranks(names):
    check_values(names, all_ways=True)


def gradients(form, both, whole):
    """The gradients of a call and of the norm of its gradient; ``None`` where torch has none. The loss weighs all numbers of the result."""
    place, name = form
    found = []
    for twice in (False, True) if 0 not in both.layout.per_rank else (False,):  # of no rows torch has no second gradient
        leaves = []
        args, kwargs = both.whole(leaves) if whole else both.rows(leaves)
        result = call(place, name, args, kwargs)
        loss = 0.0
        for each in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(each, Tensor) and each.requires_grad and each.is_floating_point():
                torch.default_generator.manual_seed(2)
                loss = loss + (each * KINDS["positive"](each.shape)).sum()
        if not isinstance(loss, Tensor):
            return None
        if twice:
            first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
            loss = sum(each.pow(2).sum() for each in first if each is not None and each.requires_grad)
            if not isinstance(loss, Tensor):
                return found
        loss.backward()
        found += [each.grad for each in leaves]
    return found


def some(cases, most=2):
    """Not more than ``most`` of the cases, from the first to the last."""
    return cases if len(cases) <= most else [cases[i * (len(cases) - 1) // (most - 1)] for i in range(most)]


def gradient_problems(names, all_cases=False):
    """What is wrong with the gradients of functions of these names."""
    between, problems = current().between, []
    for name in names:
        usual = {place: (form, found) for form, found in forms(name).items() if (place := form.split(".")[0]) and not form.endswith("_")}
        for case in CASES[name] if all_cases else some(CASES[name]):
            if name.startswith("__i") or name in ("copy_", "fill_", "zero_", "requires_grad_", "detach", "__setitem__"):
                continue
            for form, found in list(usual.values())[:1] if not name.startswith("__") else list(usual.values()):
                at = f"{form}({case})"
                if any(known(f"{at} {way}") for way, _ in ways_of(case)):
                    continue
                for way, layout in ways_of(case):
                    if 0 in layout.per_rank and name in NO_GRADIENT_OF_NO_ROWS:
                        continue
                    both = Both(case, layout)
                    try:
                        expected = gradients(found, both, whole=True)
                    except Exception:
                        continue
                    if expected is None:
                        continue
                    try:
                        grads = gradients(found, both, whole=False)
                    except Exception as error:
                        problems.append(f"{at} {way}: {type(error).__name__}: {error}"[:300])
                        continue
                    if len(grads) != len(expected):
                        problems.append(f"{at} {way}: {len(grads)} gradients, expected {len(expected)}")
                        continue
                    for i, (grad, right) in enumerate(zip(grads, expected, strict=True)):
                        if (grad is None) != (right is None):
                            wrong = f"{grad}, expected {right}"
                        elif grad is None:
                            continue
                        else:
                            grad = grad if isinstance(grad, Rows) else between.summed(plain_of(grad)) / between.size
                            rough = {"half": torch.half, "bfloat16": torch.bfloat16}.get(name)  # in which the gradient was, times the ranks
                            wrong = differ(grad.to(rough), right.to(rough)) if rough else differ(grad, right)
                        problems += [f"{at} {way}: gradient {i} of {len(grads)}: {wrong}"] if wrong else []
    return problems


def check_gradients(names, all_cases=False):
    with warnings.catch_warnings(), parwrap.distributed(batch="whole"):
        warnings.simplefilter("ignore")
        problems = gradient_problems(names, all_cases)

    assert not problems, "\n".join(problems)


@pytest.mark.slow  # the chains below differentiate too
@pytest.mark.ranks(2)
@pytest.mark.parametrize("names", list(groups()))
def test_gradients_of_first_and_second_order_are_those_of_the_whole(names):
    check_gradients(names)


@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize("names", list(groups(5)))
def test_all_gradients_are_those_of_the_whole_on_three_ranks(names):
    check_gradients(names, all_cases=True)


@functools.cache
def names_of_rules():
    """The functions that each rule of ``WRONG`` speaks of."""
    found = defaultdict(set)
    for name, its_cases in CASES.items():
        for at in (f"{form}({case})" for form in forms(name) for case in its_cases):
            for way in layouts(0, 2):
                if (rule := known(f"{at} {way}")) is not None:
                    found[rule].add(name)
    return found


def wrong_rules():
    return [pytest.param(rule, marks=pytest.mark.xfail(strict=True, reason=reason), id=reason) for rule, reason in WRONG.items()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rule", wrong_rules())
def test_what_is_wrong_today(rule):
    names = sorted(names_of_rules()[rule])
    with warnings.catch_warnings(), parwrap.distributed(batch="whole"):
        warnings.simplefilter("ignore")
        problems = values(names, all_ways=True, of=rule)

    assert not problems, "\n".join(problems)


# chains of operations

STEPS = {
    "add a number": lambda x, r: x + 1.5,
    "subtract from a number": lambda x, r: 2.0 - x,
    "multiply with itself": lambda x, r: x * x.tanh(),
    "sigmoid": lambda x, r: x.sigmoid(),
    "sine": lambda x, r: torch.sin(x),
    "divide": lambda x, r: x / (1.0 + x.abs()),
    "add a plain tensor": lambda x, r: x + r.tensor(x.shape),
    "multiply with a plain row": lambda x, r: r.tensor(x.shape[-1:]) * x,
    "clamp": lambda x, r: x.clamp(-0.7, 0.9),
    "where": lambda x, r: torch.where(x > 0, x, 0.1 * x),
    "maximum": lambda x, r: torch.maximum(x, r.tensor(x.shape)),
    "mask": lambda x, r: x.masked_fill(r.tensor(x.shape) > 0.5, 0.3),
    "softmax": lambda x, r: x.softmax(r.dim(x)),
    "cumsum": lambda x, r: x.cumsum(r.dim(x)),
    "sort": lambda x, r: x.sort(r.dim(x))[0],
    "flip": lambda x, r: x.flip([r.dim(x)]),
    "roll": lambda x, r: x.roll(1, r.dim(x)),
    "normalize": lambda x, r: F.normalize(x, dim=r.dim(x)),
    "subtract the mean": lambda x, r: x - x.mean(r.dim(x), keepdim=True),
    "subtract the whole mean": lambda x, r: x - x.mean(),
    "divide by the deviation": lambda x, r: x / (x.std() + 1.0),
    "scale by the largest": lambda x, r: x / (x.detach().abs().max() + 1.0),
    "sum": lambda x, r: x.sum(r.dim(x)),
    "mean": lambda x, r: x.mean(r.dim(x), keepdim=True),
    "amax": lambda x, r: x.amax(r.dim(x)),
    "logsumexp": lambda x, r: x.logsumexp(r.dim(x), keepdim=True),
    "transpose": lambda x, r: x.transpose(r.dim(x), r.dim(x)),
    "turn": lambda x, r: x.T if x.ndim == 2 else x,
    "permute": lambda x, r: x.permute(r.order(x)),
    "unsqueeze": lambda x, r: x.unsqueeze(r.dim(x)),
    "squeeze": lambda x, r: x.squeeze(),
    "flatten": lambda x, r: x.flatten(),
    "flatten two": lambda x, r: x.flatten(0, 1),
    "flatten the last": lambda x, r: x.reshape(x.shape[0], -1),
    "unflatten": lambda x, r: x.unflatten(-1, (2, -1)),
    "reshape": lambda x, r: x.reshape(-1, x.shape[-1]),
    "repeat": lambda x, r: x.repeat([2] + [1] * (x.ndim - 1)),
    "repeat each": lambda x, r: x.repeat_interleave(2, r.dim(x)),
    "expand": lambda x, r: x.expand(2, *x.shape),
    "join with itself": lambda x, r: torch.cat([x, x.cos()], r.dim(x)),
    "join with a plain tensor": lambda x, r: torch.cat([x, r.tensor(x.shape)], r.dim(x)),
    "stack": lambda x, r: torch.stack([x, 2 * x], r.dim(x)),
    "half": lambda x, r: x.chunk(2, r.dim(x))[-1],
    "split": lambda x, r: x.split(2, r.dim(x))[0],
    "first": lambda x, r: x.select(r.dim(x), 0),
    "narrow": lambda x, r: x.narrow(r.dim(x), 0, 1),
    "part": lambda x, r: x[:, 1:] if x.ndim > 1 else x[1:],
    "rows from": lambda x, r: x[1:],
    "every second": lambda x, r: x[::2],
    "column": lambda x, r: x[..., 0],
    "new dimension": lambda x, r: x[:, None],
    "pick rows": lambda x, r: x[r.numbers(x.shape[0], 3)],
    "pick columns": lambda x, r: x[..., r.numbers(x.shape[-1], 2)],
    "select by a mask": lambda x, r: x[x.detach().flatten(1).sum(1) > 0.01] if x.ndim > 1 else x[x > 0],
    "select numbers": lambda x, r: x[x > -0.5],
    "product": lambda x, r: x @ r.tensor((x.shape[-1], 3)),
    "product with itself": lambda x, r: x @ x.transpose(-1, -2),
    "product over rows": lambda x, r: x.transpose(-1, -2) @ x,
    "linear": lambda x, r: F.linear(x, r.tensor((2, x.shape[-1]))),
    "layer norm": lambda x, r: F.layer_norm(x, x.shape[-1:]),
    "in place": lambda x, r: x.clone().mul_(0.5).add_(r.tensor(x.shape)),
    "add in place to a part": lambda x, r: r.written(x.clone(), lambda y: y[:, 0].add_(1.0)),
    "write a column": lambda x, r: r.written(x.clone(), lambda y: y.__setitem__((..., 0), 0.25)),
    "write a row": lambda x, r: r.written(x.clone(), lambda y: y.__setitem__(0, 0.25)),
    "write where": lambda x, r: r.written(x.clone(), lambda y: y.__setitem__(y > 0.5, 0.0)),
    "write rows": lambda x, r: r.written(x.clone(), lambda y: y.__setitem__(slice(None), x.exp().clamp(max=3.0))),
    "write into a view": lambda x, r: r.written(x.clone(), lambda y: y.transpose(0, -1).mul_(0.5)),
    "write into a reshaped one": lambda x, r: r.written(x.clone(), lambda y: y.view(-1).sub_(0.5)),
    "write into rows": lambda x, r: r.written(x.clone(), lambda y: y[1:].mul_(0.5)),
    "detached": lambda x, r: x + x.detach(),
}


class Chance:
    """Numbers that all ranks, and rows and the whole, draw alike."""

    def __init__(self, seed) -> None:
        self.random = random.Random(seed)

    def dim(self, x):
        return self.random.randrange(-x.ndim, x.ndim)

    def order(self, x):
        return self.random.sample(range(x.ndim), x.ndim)

    def tensor(self, shape):
        return torch.tensor([self.random.gauss(0, 1) for _ in range(math.prod(shape))], dtype=torch.float64).view(tuple(shape))

    def numbers(self, below, count):
        return [self.random.randrange(below) for _ in range(count)]

    def written(self, x, write):
        write(x)
        return x


def chain_problem(seed):
    """What is wrong with a chain of operations; the first step that is, and the steps before."""
    between, chance = current().between, random.Random(seed)
    n, size = chance.choice([4, 5, 6, 7]), between.size
    dim = chance.choice([0, 0, 0, 1])
    layout = equal_parts(n, between.rank, size)
    torch.default_generator.manual_seed(seed)
    whole = torch.randn((n, 4) if dim == 0 else (4, n), dtype=torch.float64)
    leaves = whole.clone().requires_grad_(), as_rows(layout.own(whole, dim).clone(), layout, dim).requires_grad_()
    x, y = leaves
    done = []
    for step in chance.choices(list(STEPS), k=chance.randint(3, 8)):
        with torch.no_grad():
            try:
                if (tried := STEPS[step](x.detach(), Chance(f"{seed} {len(done)}"))).numel() not in range(1, 400):
                    continue
            except Exception:
                continue
        done.append(step)
        key = f"{seed} {len(done) - 1}"
        x = STEPS[step](x, Chance(key))
        assert x.shape == tried.shape
        try:
            y = STEPS[step](y, Chance(key))
            wrong = differ(y, x)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"[:300]
        if between.total(float(wrong is not None)):
            return f"{seed}, {n} rows in dimension {dim}: {' | '.join(done)}: {wrong}"
        if not alike(plain_of(collected(y)), x.detach()):
            return f"{seed}, {n} rows in dimension {dim}: {' | '.join(done)}: collected {brief(collected(y))}, expected {brief(x)}"
    if x.requires_grad:
        weights = Chance(seed).tensor(x.shape)
        (x * weights).sum().backward()
        (y * weights).sum().backward()
        a, b = leaves[0].grad, leaves[1].grad
        if (wrong := differ(b, a)) and a is not None:
            return f"{seed}, {n} rows in dimension {dim}: {' | '.join(done)}: the gradient is {wrong}"
    return None


def check_chains(seeds):
    with warnings.catch_warnings(), parwrap.distributed(batch="whole"):
        warnings.simplefilter("ignore")
        problems = [found for seed in seeds if (found := chain_problem(seed))]

    assert not problems, "\n".join(problems)


@pytest.mark.ranks(2)
def test_chains_of_operations_give_the_numbers_and_gradients_of_the_whole():
    check_chains(range(60))


@pytest.mark.slow
@pytest.mark.ranks(3)
def test_chains_on_three_ranks_do_so():
    check_chains(range(150, 158))


@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize("start", range(0, 1000, 100))
def test_more_chains_on_three_ranks_do_so(start):
    check_chains(range(1000 + start, 1000 + start + 100))


# means over ranks that wait until they are read


def same_on(function, kind="real"):
    """Check that ``function`` gives with rows what it gives with the whole."""
    with parwrap.distributed(batch="whole"):
        between = current().between
        problems = []
        for way, layout in layouts(between.rank, between.size).items():
            torch.default_generator.manual_seed(3)
            whole = KINDS[kind]((layout.n, 3))
            expected = function(whole.clone())
            try:
                found = function(as_rows(layout.own(whole).clone(), layout))
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            found = [collected(each) for each in found] if isinstance(found, (tuple, list)) else collected(found)
            problems += [f"{way}: {wrong}"] if (wrong := differ(found, expected)) else []

    assert not problems, "\n".join(problems)


def added_up(x):
    total = torch.zeros(())
    for _ in range(3):
        total += x.sum()
    return total


def added_to_a_number(x):
    total = 0
    for _ in range(3):
        total += x.mean()
    return total, total.item(), float(total)


def counted(x):
    right = 0
    for _ in range(3):
        right += (x > 0).sum()
    return right, right.item(), right / x.numel(), int(right)


def added_in_place(x):
    loss = x.mean()
    loss += 1
    loss *= 2
    loss -= x.sum()
    loss /= 3
    return loss


MEANS = {
    "a sum": lambda x: x.sum(),
    "a mean": lambda x: x.mean(),
    "a mean of rows": lambda x: x.mean(0),
    "kept": lambda x: x.sum(0, keepdim=True),
    "plus a number": lambda x: x.mean() + 1,
    "a number less it": lambda x: 1 - x.mean(),
    "times a number": lambda x: 3 * x.mean() / 4,
    "a number divided by it": lambda x: 2 / x.sum(),
    "of two": lambda x: (x.sum() + x.mean(), x.sum() * x.mean(), x.sum() / x.mean(), x.sum() - x.mean()),
    "with a plain tensor": lambda x: (
        x.mean(0) + torch.ones(3),
        torch.ones(3) - x.mean(0),
        torch.ones(3) * x.mean(0),
        x.mean(0) / torch.full((3,), 2.0),
    ),
    "with rows": lambda x: (x - x.mean(0), x / x.sum(), x.mean(0) * x, x + x.mean(0, keepdim=True)),
    "squared": lambda x: (x.mean() ** 2, x.mean().square(), x.mean().exp(), x.mean().sqrt()),
    "compared": lambda x: (x.mean() > 0, x.mean() < x.sum(), bool(x.sum() > 100), x.mean() == x.mean()),
    "compared with numbers": lambda x: (max(x.mean(), 5.0), min(3, x.sum().item()), 0 < x.mean(), abs(x.mean())),
    "stacked": lambda x: torch.stack([x.mean(), x.sum()]),
    "stacked with a plain one": lambda x: torch.stack([x.mean(), torch.ones(())]),
    "joined": lambda x: torch.cat([x.mean(0), x.sum(0)]),
    "joined with a plain one": lambda x: torch.cat([x.mean(0), torch.ones(2)]),
    "stacked counts": lambda x: torch.stack([(x > 0).sum(), (x < 0).sum()]),
    "shape": lambda x: (x.mean(0).view(3, 1), x.mean(0)[None], x.sum(0)[1], x.mean(0).reshape(-1), x.mean(0).unsqueeze(0), x.mean(0)[1:]),
    "turned": lambda x: (x.mean(0, keepdim=True).t(), x.mean(0, keepdim=True).T, x.sum(0).expand(2, 3), x.sum(0).repeat(2)),
    "reduced": lambda x: (x.mean(0).sum(), x.mean(0).mean(), x.mean(0).max(), x.sum(0).argmax(), x.mean(0).norm(), x.mean(0).std()),
    "converted": lambda x: (
        x.mean().double(),
        x.sum().to(torch.float64),
        x.mean().detach(),
        x.mean().clone(),
        x.sum().long(),
        x.sum().int(),
    ),
    "read": lambda x: (x.mean().item(), x.sum(0).tolist(), float(x.mean()), int(x.sum()), f"{x.sum().item():.2f}"),
    "added up in place": added_up,
    "added to a number": added_to_a_number,
    "changed in place": added_in_place,
    "counts": counted,
    "counts divided": lambda x: ((x > 0).sum() / len(x), (x > 0).sum() // 2, (x > 0).sum() % 2, (x > 0).sum() * 2, (x > 0).float().mean()),
    "counts of rows": lambda x: ((x > 0).sum(0), (x > 0).sum(0) / x.shape[0], (x > 0).sum(0) + 1, (x > 0).sum(0) > 1),
    "counts converted": lambda x: ((x > 0).sum().float(), (x > 0).sum().float() / 2, (x > 0).sum().double(), (x > 0).sum().bool()),
    "counts with floats": lambda x: ((x > 0).sum() * 0.3, (x > 0).sum() + 0.5, (x > 0).sum() - x.mean(), x.sum() / (x > 0).sum()),
    "over other types": lambda x: (x.double().sum(), x.half().mean(), x.sum(dtype=torch.float64), x.long().sum(), x.int().sum(0)),
    "weighted mean": lambda x: (x * (x > 0)).sum() / (x > 0).sum().clamp(min=1),
    "matrix over rows": lambda x: (x.T @ x, x.T @ x / len(x), (x.T @ x).trace(), (x.T @ x) @ torch.ones(3)),
    "copied into": lambda x: (
        torch.zeros(3).copy_(x.mean(0)),
        torch.zeros(3).add_(x.sum(0)),
        torch.zeros(3).mul_(0.9).add_(x.mean(0), alpha=0.1),
    ),
    "lerp": lambda x: (torch.zeros(3).lerp_(x.mean(0), 0.1), torch.lerp(torch.zeros(3), x.mean(0), 0.1)),
    "where": lambda x: (torch.where(x.mean(0) > 0, x.mean(0), 0.0), x.mean(0).clamp(min=0.0), torch.where(x > x.mean(0), x, 0.0)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_or_sum_over_rows_is_a_number_like_any_other(name):
    same_on(MEANS[name])


@pytest.mark.ranks(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", MEANS)
def test_so_it_is_on_three_ranks(name):
    same_on(MEANS[name])


@pytest.mark.ranks(2)
def test_rows_of_integers_have_a_mean_of_integers_nowhere():
    same_on(lambda x: (x.sum(), x.sum(0), x.float().mean(), x.sum() // 2, (x == 2).sum()), kind="int")


@pytest.mark.ranks(2)
def test_the_gradient_of_a_parameter_is_the_mean_over_ranks():
    with parwrap.distributed(batch="whole"):
        between = current().between
        layout = equal_parts(5, between.rank, between.size)
        torch.manual_seed(4)
        whole, start = torch.randn(5, 3), torch.randn(3)
        alone, weight = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
        ((whole * alone).tanh().mean() + alone.square().sum()).backward()
        ((as_rows(layout.own(whole).clone(), layout) * weight).tanh().mean() + weight.square().sum()).backward()
        mean = weight.grad.clone()
        torch.distributed.all_reduce(mean)

        assert alike(mean / between.size, alone.grad)
