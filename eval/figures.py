"""Draw figures of the guide: the memory of the bias of fused kernels, figures of `vispe rotate`, token orders.

python eval/figures.py [memory] [rotation] [orders]
"""

from __future__ import annotations

import sys
from pathlib import Path

import checkout  # noqa: F401  (finds vispe)
import matplotlib
import numpy as np
import timm
import torch
from PIL import Image

import vispe
from vispe.attention.bias.strip.layout import Layout, layout_of
from vispe.images.file_search import find_images
from vispe.utils.report.figure_style import BLUE, GREY, INK, ORANGE

matplotlib.use("Agg")
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]


def memory() -> None:
    """Draw how many bytes the bias of a layer takes: dense, a row per query, the strip."""
    heads, size, prefix = 12, 2, 1

    def taken(side: int, rows: bool) -> int:
        layout = Layout((side, side), prefix, rows)
        return heads * size * layout.copies * layout.copy_length

    figure = Figure(figsize=(9.5, 5.6), dpi=110, facecolor="white", layout="constrained")
    ax = figure.subplots()
    every = range(8, 129)
    lines = (
        ("dense, n x n", GREY, every, lambda s: heads * size * (s * s + prefix) ** 2, (-12, 4), "right"),
        ("strip, odd width", BLUE, range(9, 128, 2), lambda s: taken(s, False), (8, 2), "left"),
        ("strip, width a\nmultiple of 8", BLUE, range(8, 129, 8), lambda s: taken(s, False), (12, 0), "left"),
    )
    for name, color, sides, bytes_of, shift, side in lines:
        tokens = [s * s + prefix for s in sides]
        ax.plot(tokens, [bytes_of(s) for s in sides], color=color, lw=2)
        ax.annotate(name, (tokens[-1], bytes_of(sides[-1])), shift, textcoords="offset points", fontsize=10,
                    color=color, ha=side, va="center")  # fmt: skip
    for s in (9, 15, 16, 27, 32, 37, 64, 73, 128):
        rows = layout_of((s, s), prefix).rows
        place = (s * s + prefix, taken(s, rows))
        ax.plot(*place, "o", ms=8, color=ORANGE if rows else BLUE, mec="white")
        ax.annotate(
            f"{s}x{s}", place, (0, -17), textcoords="offset points", fontsize=9, color=INK, ha="center"
        )
    where = (15 * 15 + prefix, taken(15, True))
    ax.annotate(
        "a row per query", where, (-8, 12), textcoords="offset points", fontsize=10, color=ORANGE, ha="right"
    )
    units = {10**5: "0.1 MB", 10**6: "1 MB", 10**7: "10 MB", 10**8: "100 MB", 10**9: "1 GB", 10**10: "10 GB"}
    ax.set(xscale="log", yscale="log", xlim=(60, 60_000), ylim=(2e4, 2e10))
    ax.set_xticks((100, 1000, 10_000), ("100", "1000", "10 000"))
    ax.set_yticks(list(units), list(units.values()))
    ax.minorticks_off()
    ax.set_title(f"Bias of one layer, {heads} heads, half precision; dots: cached by the kernels for a grid",
                 fontsize=11, loc="left", color=INK)  # fmt: skip
    ax.set_xlabel("tokens", color=INK)
    ax.grid(color="#E3E6E8", lw=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(length=0, colors=INK)
    ax.spines[:].set_visible(False)
    figure.savefig(ROOT / "docs" / "figures" / "attention-memory.png")


def rotation() -> None:
    """Draw the effect of rotations on an untrained model, and on one that treats all directions equally."""
    from vispe.evaluate import rotation as measure
    from vispe.evaluate.rotation.figures.record_figures import plot_d4, plot_polar

    (path,) = find_images(["skimage:ihc"])
    whole = torch.from_numpy(np.asarray(Image.open(path)).copy()).permute(2, 0, 1) / 127.5 - 1
    images = list(measure.random_crops([whole], (336, 336), 5))
    size = {"img_size": 224, "dynamic_img_size": True}
    figure = Figure(figsize=(13, 10.5), dpi=110, facecolor="white", layout="constrained")
    circles = []
    for part, spec in zip(figure.subfigures(2, 1, hspace=0.04), ("learn", "alibi2d"), strict=True):
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **size)
        if spec != "learn":
            model = vispe.symmetrize(vispe.convert(model, spec))
        f = measure.VisionModel(model.eval())
        rows = measure.equivariance(f, images, measures=["error"]) + measure.position_equivariance(f, images)
        rows += measure.angle_equivariance(f, images, angles=range(0, 360, 30))
        result = measure.RotationResult(rows, tuple(map(str, range(len(images)))))
        grid = part.add_gridspec(1, 2, width_ratios=(1.4, 1))
        plot_d4(result, part.add_subplot(grid[0]))
        circles.append(plot_polar(result, part.add_subplot(grid[1], projection="polar")))
        words = "learned positions" if spec == "learn" else "alibi2d and a symmetric patch kernel"
        part.suptitle(f"A small transformer with random weights, {words}", x=0.01, ha="left", size=13)
    for ax in circles:  # one scale
        ax.set_ylim(0, max(ax.get_ylim()[1] for ax in circles))
    figure.savefig(ROOT / "docs" / "figures" / "rotation.png")


def orders() -> None:
    """Draw in which order the patches of a grid are written, as colours, and the first steps as numbers."""
    from vispe.grid.token_orders import fractal, quadtree, raster, shuffled

    side, shown = 11, 10
    count = side * side
    result = {
        "raster": raster(count),
        "shuffled": shuffled(count, generator=torch.Generator().manual_seed(2)),
        "fractal": fractal(count),
        "quadtree": quadtree(side, side),
    }
    figure = Figure(figsize=(11, 3.1), dpi=110, facecolor="white", layout="constrained")
    for ax, (name, order) in zip(figure.subplots(1, 4), result.items(), strict=True):
        step = np.empty(count, int)
        step[order.numpy()] = np.arange(count)
        ax.imshow(step.reshape(side, side), cmap="viridis")
        for number, cell in enumerate(order[:shown].tolist()):
            ax.text(
                cell % side, cell // side, str(number + 1), ha="center", va="center", color="white", size=8
            )
        ax.set_title(name, loc="left", size=11, color=INK)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    figure.savefig(ROOT / "docs" / "figures" / "orders.png")


if __name__ == "__main__":
    (ROOT / "docs").mkdir(exist_ok=True)
    figures = {"memory": memory, "rotation": rotation, "orders": orders}
    for chosen in sys.argv[1:] or figures:
        figures[chosen]()
