"""Draw the figures of README: position in features, encodings, positions in a prompt.

python eval/docs_figures.py [encodings] [schemes]
python eval/docs_figures.py position --weights dinov2_vits14.safetensors --retrofit RETROFIT_FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

import checkout  # noqa: F401  (finds vispe)
import matplotlib
import numpy as np
import torch
from PIL import Image

import vispe
from vispe.evaluate.evaluated import EvaluatedModel, load_evaluated_model
from vispe.evaluate.plots.positions import plot_positions
from vispe.utils.report.figure_style import INK, SOFT

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
WALL = (
    *("alibi2d", "alibi_graph", "gaussian2d", "kerple", "sandwich", "lookhere", "seqpe"),
    *("comrope_ap", "comrope_ld", "gta", "rope_axial", "rope_mixed", "rope_dinov3", "liere"),
    *("fope", "sincos2d", "border", "fourier", "fourier_learned", "legendre", "positional_attention"),
)
SCHEMES = ("mrope", "videorope", "vrope")
SIDE = 518


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", default=["encodings", "schemes"])
    parser.add_argument("--weights", help="of a DINOv2 ViT-S/14, for `position`")
    parser.add_argument("--retrofit", help="folder of a retrofit of it, for `position`")
    options = parser.parse_args()
    for name in options.figures:
        if name == "position":
            position(options.weights, options.retrofit)
        else:
            {"encodings": encodings, "schemes": schemes}[name]()


def position(weights: str, retrofit: str) -> None:
    """Draw the features of noise and of gravel, of a DINOv2 and of its retrofit."""
    import skimage.data

    before = load_evaluated_model("vit_small_patch14_dinov2", weights=weights, device="cpu")
    after = load_evaluated_model(retrofit, device="cpu")
    gravel = Image.fromarray(skimage.data.gravel()).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    noise = np.random.default_rng(0).random((SIDE, SIDE, 3)).astype(np.float32)
    shown = {"noise": noise, "gravel": np.asarray(gravel.convert("RGB"), np.float32) / 255}
    figure = Figure(figsize=(12, 2.15), dpi=110, facecolor="white", layout="constrained")
    for part, (name, image) in zip(figure.subfigures(1, 2, wspace=0.05), shown.items(), strict=True):
        axes = part.subplots(1, 3)
        axes[0].imshow(image)
        axes[1].imshow(colours(before, image), interpolation="nearest")
        axes[2].imshow(colours(after, image), interpolation="nearest")
        for ax, title in zip(axes, (name, "features of DINOv2", "after a retrofit"), strict=True):
            plain(ax, title)
    figure.savefig(FIGURES / "position-map.png")


def colours(subject: EvaluatedModel, image: np.ndarray) -> np.ndarray:
    """Return the three strongest components of the features of an image as colours (h, w, 3)."""
    assert subject.features is not None
    with torch.no_grad():
        maps = subject.features(subject.tensor(image)[None])[0].float()
    flat = maps.flatten(1).T
    flat = flat - flat.mean(0)
    result = flat @ torch.linalg.svd(flat, full_matrices=False).Vh[:3].T
    # each component fills the range of a colour but for the outermost 1 %
    low, high = result.quantile(0.01, 0), result.quantile(0.99, 0)
    return ((result - low) / (high - low)).clamp(0, 1).unflatten(0, maps.shape[1:]).numpy()


def encodings() -> None:
    """Draw the bias or similarity of one query under many encodings, without scales."""
    figure = Figure(figsize=(12, 4.3), dpi=110, facecolor="white", layout="constrained")
    for ax, name in zip(figure.subplots(3, 7).flat, WALL, strict=True):
        # each head of lookhere covers one direction; their mean shows none
        vispe.plot_bias(name, (18, 28), (8, 10), ax, head=0 if name == "lookhere" else None)
        ax.images[0].colorbar.remove()
        ax.set(xlabel="", ylabel="")
        plain(ax, name)
    figure.savefig(FIGURES / "encodings.png")


def schemes() -> None:
    """Draw the coordinates of the tokens of a prompt with an image and a video, under three schemes."""
    figure = Figure(figsize=(12, 3.4), dpi=110, facecolor="white", layout="constrained")
    axes = figure.subplots(1, len(SCHEMES), sharey=True)
    for ax, name in zip(axes, SCHEMES, strict=True):
        plot_positions(name, ax=ax)
        ax.set_title("")
        ax.set_title(name, size=11, color=INK, loc="left", pad=18)
        if ax is not axes[0]:
            ax.set_ylabel("")
    figure.savefig(FIGURES / "schemes.png")


def plain(ax: Axes, title: str, size: float = 9.5) -> None:
    """Remove everything but the figure and its title."""
    ax.set_title("")
    ax.set_title(title, size=size, color=INK, loc="left", pad=4)
    ax.set(xticks=[], yticks=[])
    ax.tick_params(colors=SOFT)
    ax.spines[:].set_visible(False)
    ax.set_anchor("NW")


if __name__ == "__main__":
    main()
