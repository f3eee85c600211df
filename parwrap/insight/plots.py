"""Draws what ``scaling`` and ``verify`` have measured. matplotlib is imported when a picture is asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from parwrap.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_differences", "draw_speed", "refuse_plot"]

BLUE, ORANGE, GRAY = "#2f6db0", "#d4572a", "#667079"
MOST = 60
"""The most characters of what differs."""
FORMATS = (".png", ".svg", ".pdf")


def refuse_plot(file: str | None) -> None:
    """Refuse a ``file`` that cannot be drawn, before anything is measured."""
    if file is None:
        return
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'parwrap[report]'.")
    if not file.lower().endswith(FORMATS):
        raise UsageError(f"--plot {file} has no ending that says what to draw: end it with {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")
    if not os.path.isdir(os.path.dirname(file) or "."):
        raise UsageError(f"--plot {file} is in a folder that does not exist: make the folder first.")


def draw_speed(
    ranks: Sequence[int], speeds: Sequence[float], spread: Sequence[tuple[float, float]], efficiency: Sequence[float], title: str, file: str
) -> None:
    """Draw samples per second and efficiency over the number of ranks.

    Args:
        ranks: the numbers of ranks.
        speeds: samples per second.
        spread: the samples per second between which 8 of 10 steps are.
        efficiency: as fractions.
        title: what is drawn.
        file: where to.
    """
    figure, axes = _figure(title, rows=2, heights=(3, 1.2))
    top, bottom = axes
    ideal = [speeds[0] * each / ranks[0] for each in ranks]
    top.plot(ranks, ideal, "--", color=GRAY, label="ideal")
    top.plot(ranks, speeds, "o-", color=BLUE, label="measured")
    top.vlines(ranks, *zip(*spread, strict=True), color=BLUE, lw=5, alpha=0.3, label="8 of 10 steps")
    highest = max(*ideal, *speeds, *(fast for _, fast in spread))
    top.set(ylabel="samples per second", ylim=(0, 1.1 * highest))
    _write_values(top, ranks, speeds, [f"{speed:,.0f}" for speed in speeds])
    top.yaxis.set_major_formatter("{x:,.0f}")
    top.legend(frameon=False, loc="upper left")
    bottom.plot(ranks, [100 * each for each in efficiency], "o-", color=BLUE)
    bottom.axhline(100, ls="--", color=GRAY)
    bottom.set(ylabel="efficiency", xlabel="ranks", ylim=(0, max(125, 115 * max(efficiency))))
    _write_values(bottom, ranks, [100 * each for each in efficiency], [f"{each:.0%}" for each in efficiency])
    bottom.yaxis.set_major_formatter("{x:.0f}%")
    for each in axes:
        each.set_xscale("log", base=2)
        each.set_xticks(ranks, [str(number) for number in ranks])
        each.set_xticks([], minor=True)
        each.margins(x=0.12)
    _save(figure, file)


def draw_differences(
    by_step: Sequence[float | None], tolerance: float, leaves: tuple[int, str] | None, title: str, file: str, lowest: float = 1e-10
) -> None:
    """Draw the largest difference after each step beside what rounding may be.

    Args:
        by_step: the differences; ``None`` where a value is no number.
        tolerance: the largest difference by rounding after the first step; each further step adds as much.
        leaves: the step that differs first, and what differs there.
        title: what is drawn.
        file: where to.
        lowest: below this the axis is linear, so that it has a place for 0.
    """
    figure, (axes,) = _figure(title)
    steps = range(1, len(by_step) + 1)
    last = max(len(by_step), leaves[0] if leaves else 1, 5)
    axes.plot(range(1, last + 1), [tolerance * step for step in range(1, last + 1)], "--", color=GRAY, label="tolerance")
    axes.plot(steps, [float("nan") if each is None else each for each in by_step], "o-", ms=4, color=BLUE, label="largest difference")
    if leaves:
        step, what = leaves
        axes.axvline(step, color=ORANGE, lw=1.5, label="first step that differs")
        shown = what if len(what) <= MOST else f"{what[: MOST // 2 - 2]}...{what[1 - MOST // 2 :]}"
        axes.set_title(f"step {step}: {shown}", loc="left", fontsize="medium", color=ORANGE)
    if no_number := [step for step, each in zip(steps, by_step, strict=True) if each is None]:
        axes.plot(no_number, [0.97] * len(no_number), "x", color=ORANGE, transform=axes.get_xaxis_transform(), label="not a number")
    axes.set_yscale("symlog", linthresh=lowest)
    highest = max([each for each in by_step if each is not None] + [tolerance * last, lowest])
    axes.set(xlabel="step of an optimizer", ylabel="relative difference", xlim=(0.5, last + 0.5), ylim=(0, 10 * highest))
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    _save(figure, file)


def _write_values(axes: Any, ranks: Sequence[int], values: Sequence[float], texts: Sequence[str]) -> None:
    """Write each value below its point, or above it where there is no room."""
    for each, value, text in zip(ranks, values, texts, strict=True):
        low = value < 0.35 * axes.get_ylim()[1]
        written = axes.annotate(text, (each, value), (0, 9 if low else -9), textcoords="offset points", ha="center")
        written.set(va="bottom" if low else "top", bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5})


def _figure(title: str, rows: int = 1, heights: Sequence[float] = (1,)) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2 + 1.6 * (rows - 1)), dpi=150, layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    figure.suptitle(title, x=0.02, ha="left", fontsize="medium", fontweight="bold", wrap=True)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="y", color="#e3e6e8", lw=0.8)
        each.set_axisbelow(True)
    return figure, axes


def _save(figure: Figure, file: str) -> None:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "parwrap"}):  # an SVG has its words as text, and no random names
        figure.savefig(file, metadata={"Date": None} if file.lower().endswith(".svg") else None)
