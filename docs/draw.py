"""Draws the pictures of ``concepts.rst`` and ``whole_batches.rst``: ``python docs/draw.py`` writes them.

parwrap's own samplers say what each rank reads.
"""

from __future__ import annotations

from pathlib import Path

from parwrap.data.samplers import DealtBatches, SplitBatches

HERE = Path(__file__).parent
COLORS = ("#4c78a8", "#f58518", "#9aa3ad")
"""Of rank 0, of rank 1, and of what both do."""

SAMPLES, BATCH = 12, 4


def text(x: float, y: float, words: str, size: int = 14, color: str = "#1f2933", anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}>{words}</text>'


def box(x: float, y: float, width: float, height: float, color: str, words: str = "", size: int = 14) -> str:
    words = text(x + width / 2, y + height / 2 + size * 0.36, words, size, "#fff", "middle") if words else ""
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{color}"/>{words}'


def svg(width: int, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>', *parts, "</svg>", ""])


def in_batches(samples: list[int]) -> list[list[int]]:
    return [samples[at : at + BATCH] for at in range(0, len(samples), BATCH)]


def shares() -> str:
    """What two ranks read of twelve samples in batches of four."""
    samples = list(range(SAMPLES))
    ways = {
        'batch="per_rank": every second sample; a step sees 2 x 4 samples': [
            in_batches(list(DealtBatches(samples, rank, 2))) for rank in (0, 1)
        ],
        'batch="global": a part of each batch; a step sees 4 samples': [
            [list(part) for part in SplitBatches(in_batches(samples), rank, 2)] for rank in (0, 1)
        ],
        "a sampler of your own: every second batch; a step sees 2 x 4 samples": [
            list(DealtBatches(in_batches(samples), rank, 2)) for rank in (0, 1)
        ],
        "evaluation: every rank reads everything": [in_batches(samples)] * 2,
    }
    parts = []
    for row, (way, ranks) in enumerate(ways.items()):
        top = 20 + row * 112
        parts.append(text(20, top + 14, way, 15, bold=True))
        for rank, batches in enumerate(ranks):
            y, x = top + 28 + rank * 34, 90
            parts.append(text(20, y + 18, f"rank {rank}"))
            for batch in batches:
                for sample in batch:
                    parts.append(box(x, y, 28, 26, COLORS[rank], str(sample)))
                    x += 31
                x += 12
    return svg(560, 470, parts)


def step() -> str:
    """One step of two ranks on a time line."""
    parts = []
    for rank, late in ((0, 0), (1, 40)):
        y = 50 + rank * 96
        parts.append(text(20, y + 24, f"rank {rank}", bold=True))
        x = 90.0
        for words, width in (("batch", 70 + late / 2), ("forward", 110 + late / 2), ("backward", 220 - late)):
            parts.append(box(x, y, width - 4, 36, COLORS[rank], words))
            x += width
        parts.append(box(500, y, 96, 36, COLORS[rank], "step"))
        parts += [box(300 + 64 * bucket, y + 41, 60, 18, COLORS[2], f"bucket {bucket + 1}", 11) for bucket in range(3)]
    parts.append(text(90, 30, "its own share"))
    parts.append(text(270, 30, "gradients are averaged while backward runs"))
    parts.append(text(500, 240, "same weights on all ranks", anchor="middle"))
    parts.append(text(90, 240, "the loss of all ranks travels with them"))
    return svg(640, 260, parts)


CHOICES = (
    ("The numbers of one process?", "--batch whole", "printed ones too; --batch global: its weights, faster"),
    ("As many samples a second as possible?", "nothing: --batch per-rank", "perhaps --lr linear, as batches are larger"),
    ("Every sample exactly once?", "--uneven join", "ranks with fewer samples count less"),
    ("Too large for one GPU?", "--strategy fsdp --wrap Block", "or zero1, if only Adam's state is"),
    ("A slow network?", "--strategy local_sgd --every 8", "or --compress bf16"),
    ("Metrics over a training pass?", "parwrap.total(values, of=loader)", "in the script"),
    ("A long evaluation?", '@parwrap.evaluate(reduce="sum")', "in the script"),
)


def options() -> str:
    """Which option to choose."""
    parts = []
    for row, (question, answer, remark) in enumerate(CHOICES):
        y = 16 + row * 62
        parts.append(text(20, y + 30, question, 15, bold=True))
        parts.append(f'<path d="M318 {y + 25} h26 m-7 -5 l7 5 l-7 5" fill="none" stroke="#9aa3ad" stroke-width="2"/>')
        parts.append(box(354, y + 2, 276, 28, COLORS[0], answer))
        parts.append(text(360, y + 47, remark, 12, "#52606d"))
    return svg(650, 16 + 62 * len(CHOICES), parts)


def rows() -> str:
    """What happens to a whole batch of six samples on two ranks."""
    parts = [text(20, 34, 'batch="whole": six rows, one tensor', 15, bold=True)]
    steps = ((90, "x", 60), (190, "model(x)", 90), (320, "== y", 70))
    for rank in (0, 1):
        for row in range(3):
            y = 54 + rank * 108 + row * 32
            for x, words, width in steps:
                parts.append(box(x, y, width, 26, COLORS[rank], words if row == 1 else ""))
        parts.append(text(20, 104 + rank * 108, f"rank {rank}"))
    parts.append(text(415, 150, "(... == y).sum().item()"))
    parts.append(text(415, 172, "one number from each rank", 12, "#52606d"))
    parts.append(box(586, 138, 64, 28, COLORS[2], "5 of 6"))
    parts.append(text(20, 292, "x[torch.randperm(6)]", bold=True))
    parts.append(text(190, 292, "takes other rows: they are collected first, on every rank"))
    parts += [box(190 + 46 * place, 304, 42, 26, COLORS[row // 3], str(row)) for place, row in enumerate((4, 0, 3, 5, 1, 2))]
    return svg(670, 350, parts)


PICTURES = {"rows.svg": rows, "shares.svg": shares, "step.svg": step, "options.svg": options}


def main() -> None:
    for name, draw in PICTURES.items():
        (HERE / "pictures" / name).write_text(draw(), "utf-8")


if __name__ == "__main__":
    main()
