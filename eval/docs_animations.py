"""Draw the animations of the explanations: SVG without scripts, static with `prefers-reduced-motion`.

python eval/docs_animations.py [bias] [turn] [waves] [strip]
python eval/docs_animations.py position --weights dinov2_vits14.safetensors
"""

from __future__ import annotations

import argparse
import base64
import io
import math
from pathlib import Path

import checkout  # noqa: F401  (finds vispe)
import matplotlib
import numpy as np
import torch
from PIL import Image

import vispe
from vispe.attention import DistanceBias
from vispe.attention.bias.strip.layout import Layout
from vispe.attention.bias.strip.runs import build
from vispe.evaluate.evaluated import load_evaluated_model
from vispe.utils.report.figure_style import BLUE, GREY, INK, ORANGE, PALE, SHADE, SOFT

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
LARGEST = 300_000  # bytes


class Film:
    """An SVG of `width` x `height` px: what stands still, and frames that are shown one after another."""

    def __init__(self, width: int, height: int, seconds: float = 8.0) -> None:
        self.size, self.seconds = (width, height), seconds
        self.still: list[str] = []
        self.frames: list[list[str]] = []
        self.rules: list[str] = []

    def write(self, name: str, words: str, shown: int = 0) -> None:
        """Write the figure; readers who prefer reduced motion see frame `shown`. `words` describe it."""
        width, height = self.size
        style = [
            f"text{{font:13px system-ui,sans-serif;fill:{INK}}}.s{{fill:{SOFT};font-size:12px}}",
            "image{image-rendering:pixelated}",
            *self.rules,
        ]
        if n := len(self.frames):
            style += [
                f".f{{visibility:hidden;animation:f {self.seconds}s step-end infinite}}",
                f"@keyframes f{{0%{{visibility:visible}}{100 / n:.4f}%,100%{{visibility:hidden}}}}",
                "@media(prefers-reduced-motion:reduce){.f{animation:none}.k{visibility:visible}}",
            ]
        body = list(self.still)
        for i, frame in enumerate(self.frames):
            retained = " k" if i == shown else ""
            delay = f"{i * self.seconds / n:.3f}s"
            body.append(f'<g class="f{retained}" style="animation-delay:{delay}">{"".join(frame)}</g>')
        text = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img"><title>{words}</title><style>{"".join(style)}</style>'
            f'<rect width="{width}" height="{height}" fill="#fff"/>{"".join(body)}</svg>\n'
        )
        assert len(text) < LARGEST, f"{name} has {len(text)} bytes"
        (PICTURES / name).write_text(text)
        print(name, f"{len(text) / 1000:.0f} kB")


def heat(values: np.ndarray, x: float, y: float, cell: float, low: float, high: float) -> str:
    """Return a map (rows, columns) of numbers in viridis, or (rows, columns, 3) of colours, `cell` px each."""
    if values.ndim == 2:
        image = Image.fromarray((255 * np.clip((values - low) / (high - low), 0, 1)).astype(np.uint8), "P")
        image.putpalette(
            (255 * matplotlib.colormaps["viridis"](np.arange(256))[:, :3]).astype(np.uint8).tobytes()
        )
    else:
        image = Image.fromarray((255 * np.clip(values, 0, 1)).astype(np.uint8))
    image.save(raw := io.BytesIO(), format="PNG", optimize=True)
    rows, columns = values.shape[:2]
    data = base64.b64encode(raw.getvalue()).decode()
    return (
        f'<image x="{x:g}" y="{y:g}" width="{columns * cell:g}" height="{rows * cell:g}" '
        f'href="data:image/png;base64,{data}"/>'
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, color: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="none" '
        f'stroke="{color}" stroke-width="3"/>'
    )


def bias() -> None:
    """Draw what four biases add for a query that walks over the grid."""
    rows, columns, cell = 14, 20, 10
    shown = {
        "alibi2d.local": "distance",
        "alibi2d": "distance, around the border",
        "gaussian2d": "a neighbourhood",
        "lookhere": "one corner, in this head",
    }
    grid = vispe.Grid((rows, columns))
    pos = grid.positions()
    film = Film(430, 385, 9.6)
    # once around, as a rounded rectangle
    turns = np.linspace(0, 2 * np.pi, 32, endpoint=False)
    path = [(round(6.5 - 5.2 * math.sin(a) ** 3), round(9.5 + 8.2 * math.cos(a))) for a in turns]
    film.frames = [[] for _ in path]
    for k, (name, words) in enumerate(shown.items()):
        x, y = 10 + 210 * (k % 2), 48 + 195 * (k // 2)
        film.still += [text(x, y - 28, name), text(x, y - 10, words, "s")]
        encoding = vispe.create_encoding(name, num_heads=12, depth=12)
        head = 2 if name == "lookhere" else 0
        with torch.no_grad():
            dense = encoding.bias(pos, 0).dense(pos, pos)[0, head].numpy()
        low = dense[np.isfinite(dense)].min()
        dense = np.maximum(dense, low)
        for frame, (row, column) in zip(film.frames, path, strict=True):
            values = dense[row * columns + column].reshape(rows, columns)
            frame += [
                heat(values, x, y, cell, low, dense.max()),
                f'<circle cx="{x + cell * (column + 0.5):g}" cy="{y + cell * (row + 0.5):g}" r="4" '
                f'fill="#fff" stroke="{INK}"/>',
            ]
    film.write(
        "bias-animation.svg", "A query walks over a grid; the bias of four encodings moves along with it", 4
    )


def turn() -> None:
    """Draw query and key as arrows that turn while both tokens move along a row."""
    film = Film(480, 255)
    steps, interval, cell, seconds = 8, 3, 38, 8
    left, top = 14, 12
    for i in range(steps + interval + 1):
        film.still.append(
            f'<rect x="{left + cell * i}" y="{top}" width="{cell - 4}" height="26" rx="4" fill="{SHADE}"/>'
        )
        film.still.append(text(left + cell * i + 17, top + 44, str(i), "s", "middle"))
    moving = f"{seconds}s ease-in-out infinite alternate"
    film.rules.append(
        f".m{{animation:m {moving}}}@keyframes m{{to{{transform:translateX({steps * cell}px)}}}}"
    )
    for name, at, color in (("q", 0, BLUE), ("k", interval, ORANGE)):
        x = left + cell * at + 17
        film.still.append(
            f'<g class="m"><circle cx="{x}" cy="{top + 13}" r="11" fill="{color}"/>'
            f'<text x="{x}" y="{top + 17}" text-anchor="middle" style="fill:#fff">{name}</text></g>'
        )
    for i, (degrees, words) in enumerate(((60, "fast pair"), (20, "slower pair"), (5, "slow pair"))):
        cx, cy, r = 84 + 156 * i, 145, 54
        film.rules.append(
            f".r{i}{{transform-origin:{cx}px {cy}px;animation:r{i} {moving}}}"
            f"@keyframes r{i}{{to{{transform:rotate({steps * degrees}deg)}}}}"
        )
        film.still.append(f'<circle cx="{cx}" cy="{cy}" r="{r}" fill="none" stroke="{PALE}"/>')
        between = math.radians(interval * degrees)
        end = (cx + 30 * math.cos(between), cy + 30 * math.sin(between))
        # the angle between the two, query first, and both arrows, in one group that turns
        parts = [
            f'<path d="M{cx} {cy}L{cx + 30} {cy}A30 30 0 {int(between > math.pi)} 1 {end[0]:.1f} {end[1]:.1f}Z" '
            f'fill="{GREY}" opacity="0.35"/>'
        ]
        for angle, color in ((0.0, BLUE), (between, ORANGE)):
            x, y = cx + r * math.cos(angle), cy + r * math.sin(angle)
            parts.append(
                f'<path d="M{cx} {cy}L{x:.1f} {y:.1f}" stroke="{color}" stroke-width="4" stroke-linecap="round"/>'
            )
        film.still.append(f'<g class="r{i}">{"".join(parts)}</g>')
        film.still.append(text(cx, cy + r + 20, f"{words}: {degrees}°", "", "middle"))
        film.still.append(text(cx, cy + r + 37, f"a step, {interval * degrees}° between", "s", "middle"))
    film.rules.append("@media(prefers-reduced-motion:reduce){.m,.r0,.r1,.r2{animation:none}}")
    film.write(
        "rotary-rotation.svg", "Query and key rotate as they move; the angle between them stays the same"
    )


def waves() -> None:
    """Draw the score of equal queries and keys as pairs of channels are added, axial and mixed."""
    side, cell = 33, 6
    grid = vispe.Grid((side, side))
    film, counts = Film(470, 265, 12), [*range(1, 17), 20, 24, 28, 32, 32, 32, 32]
    film.frames = [[text(455, 20, f"{n} pairs" if n > 1 else "1 pair", "s", "end")] for n in counts]
    middle = side // 2 * (side + 1)
    for k, name in enumerate(("rope_axial", "rope_mixed")):
        torch.manual_seed(0)
        encoding = vispe.create_encoding(name, dim=512, num_heads=8, depth=1)
        with torch.no_grad():
            rotated = encoding.transform(grid.positions(), 0)
        # of a mixed rotation a head whose two directions lie between the axes
        head = 0 if name == "rope_axial" else int((encoding.freqs[0].abs() - 0.7).abs().amax(1).argmin())
        cos, sin = rotated.cos[0, head].double().numpy(), rotated.sin[0, head].double().numpy()
        waves = cos * cos[middle] + sin * sin[middle]  # of the angle between each cell and the middle one
        order = np.arange(32).reshape(2, 16).T.flatten()  # axes in turn
        x = 10 + 230 * k
        film.still.append(text(x, 20, name))
        for frame, n in zip(film.frames, counts, strict=True):
            score = waves[:, order[:n]].mean(1).reshape(side, side)
            frame += [
                heat(score, x, 32, cell, -1, 1),
                f'<circle cx="{x + side * cell / 2:g}" cy="{32 + side * cell / 2:g}" r="4" fill="#fff" '
                f'stroke="{INK}"/>',
            ]
    film.still.append(text(10, 252, "dark: out of phase; bright: in phase", "s"))
    film.write(
        "rotary-waves.svg",
        "The sum of waves of an axial and of a mixed rotation, pair by pair",
        len(counts) - 1,
    )


def strip() -> None:
    """Draw a query that moves down its column and to the next, and the run of the strip that is its bias."""
    rows, columns, cell, small, left = 4, 6, 28, 14, 90
    grid = vispe.Grid((rows, columns))
    layout = Layout(grid.shape, 0, False)
    runs, _ = build(DistanceBias((1.0,), grid.positions()).table(grid), None, layout)
    values, base = runs[0].reshape(columns, -1).numpy(), layout.base().reshape(rows, columns)
    length, count = values.shape[1], rows * columns
    low = float(values.min())
    film = Film(700, 370, 16)
    film.rules.append("text.n{font-size:8px}")
    film.still += [
        text(10, 20, "the bias of one query on all keys"),
        text(10, 178, f"the strip: {values.size} numbers in place of {count} x {count} = {count**2}"),
    ]
    lines = [192 + column * (small + 12) for column in range(columns)]
    for column, y in enumerate(lines):
        film.still.append(text(10, y + 11, f"column {column}", "s"))
        film.still.append(heat(values[column : column + 1], left, y, small, low, 0.0))
    for column in range(1, 5):
        # down one column and up the next
        for row in range(rows) if column % 2 else reversed(range(rows)):
            start = int(base[row, column]) - column * length
            run, y = values[column, start : start + count], lines[column]
            film.frames.append(
                [
                    heat(run.reshape(rows, columns), 10, 32, cell, low, 0.0),
                    box(10 + cell * column, 32 + cell * row, cell, cell, ORANGE),
                    text(220, 70, f"query in row {row}, column {column}:"),
                    text(220, 92, f"one run of {count} numbers, from entry {start} of line {column}"),
                    box(left + small * start, y - 2, small * count, small + 4, ORANGE),
                    *(
                        number(x, y, key, run[key] < 0.4 * low)
                        for key in range(count)
                        for x, y in (
                            (10 + cell * (key % columns + 0.5), 35 + cell * (key // columns + 0.5)),
                            (left + small * (start + key + 0.5), lines[column] + 10),
                        )
                    ),
                ]
            )
    film.write(
        "strip-animation.svg",
        "A query moves over the grid; its bias is one run of the strip, which slides along",
        2,
    )


def number(x: float, y: float, key: int, dark: bool) -> str:
    fill = ' style="fill:#fff"' if dark else ""
    return f'<text x="{x:g}" y="{y:g}" class="n" text-anchor="middle"{fill}>{key}</text>'


def position(weights: str) -> None:
    """Draw the features of a DINOv2 for noise, for other noise, and with its position table shifted."""
    subject = load_evaluated_model("vit_small_patch14_dinov2", weights=weights, device="cpu", img_size=224)
    model = subject.features.model
    rng = np.random.default_rng(0)
    noises = [rng.random((224, 224, 3)).astype(np.float32) for _ in range(16)]

    def maps(images: list[np.ndarray]) -> torch.Tensor:
        with torch.no_grad():
            return subject.features(torch.stack([subject.tensor(p) for p in images])).float()

    first = maps(noises[:8])
    flat = first.mean(0).flatten(1).T
    mean = flat.mean(0)
    axes = torch.linalg.svd(flat - mean, full_matrices=False).Vh[:3].T

    def three(result: torch.Tensor) -> torch.Tensor:
        return (result.flatten(1).T - mean) @ axes

    spread = torch.stack([three(m) for m in first])
    low, high = (spread.flatten(0, 1).quantile(q, 0) for q in (0.02, 0.98))

    def colours(result: torch.Tensor) -> np.ndarray:
        return ((three(result) - low) / (high - low)).clamp(0, 1).unflatten(0, result.shape[1:]).numpy()

    film = Film(520, 222, 16)
    film.still += [
        text(10, 20, "the image: noise"),
        text(180, 20, "features of DINOv2"),
        text(350, 20, "without its table"),
    ]
    table = model.pos_embed.detach().clone()
    model.pos_embed.data.zero_()
    without = maps(noises[:8])
    model.pos_embed.data.copy_(table)
    prefix = int(not model.no_embed_class) * model.num_prefix_tokens
    side = math.isqrt(table.shape[1] - prefix)
    for i in range(16):
        words, own, bare = "another image every time", None, None
        if i < 8:
            own, bare, image = first[i], without[i], noises[i]
        else:  # the same image, with the table shifted to the right
            step = i - 7
            body = table[:, prefix:].unflatten(1, (side, side)).roll(round(step * side / 8), 2)
            model.pos_embed.data[:, prefix:] = body.flatten(1, 2)
            own, bare, image = maps([noises[7]])[0], without[7], noises[7]
            words = "the same image; the table is shifted to the right"
        small = image[::7, ::7]
        film.frames.append(
            [
                heat(small, 10, 30, 5, 0, 1),
                heat(colours(own), 180, 30, 10, 0, 1),
                heat(colours(bare), 350, 30, 10, 0, 1),
                text(10, 210, words, "s"),
            ]
        )
    model.pos_embed.data.copy_(table)
    film.write(
        "position-shift.svg",
        "On noise, features of DINOv2 form a map of position, which moves with the position table",
        0,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", default=["bias", "turn", "waves", "strip"])
    parser.add_argument("--weights", help="of a DINOv2 ViT-S/14, for `position`")
    options = parser.parse_args()
    for name in options.figures:
        if name == "position":
            position(options.weights)
        else:
            {"bias": bias, "turn": turn, "waves": waves, "strip": strip}[name]()
