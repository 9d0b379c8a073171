"""Draw docs/figures/architecture.png: packages by layer and their imports, parsed from the source.

python eval/architecture.py
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import checkout  # noqa: F401  (finds vispe and tests)
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from tests.test_architecture import FILES, LAYERS, PACKAGE, all_imports, package_of
from vispe.utils.report.figure_style import BLUE, FAINT, GREY, INK, new_figure

OUT = Path(__file__).parents[1] / "docs" / "figures" / "architecture.png"
WIDTH = 9.0  # of a layer
MANY = 4  # imports between two layers that are drawn
SHOWN = [tuple(name for name in layer if not name.startswith("_")) for layer in LAYERS]


def title(name: str) -> str:
    """Return the first line of a package's docstring."""
    path = PACKAGE / name if name else PACKAGE
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")[0].rstrip(".")


def boxes(ax: Axes) -> dict[str, float]:
    """Draw a box for each package and return the height of its layer."""
    heights = {}
    for level, packages in enumerate(SHOWN):
        width = WIDTH / len(packages)
        for k, name in enumerate(packages):
            left = k * width
            box = FancyBboxPatch(
                (left + 0.06, level + 0.1), width - 0.12, 0.8, boxstyle="round,pad=0,rounding_size=0.12"
            )
            box.set(facecolor=FAINT, edgecolor=GREY, linewidth=0.8)
            ax.add_patch(box)
            files = sum(package_of(file) == name for file in FILES)
            label = name or "vispe (top level)"
            ax.text(left + 0.25, level + 0.62, label, weight="bold", color=INK, fontsize=10, va="center")
            words = title(name)
            words = words if len(words) < 11.5 * width else re.split("[:.,]", words)[0]
            ax.text(left + 0.25, level + 0.3, words, color=INK, fontsize=7.5, va="center")
            count = f"{files} file{'s' * (files != 1)}"
            ax.text(
                left + width - 0.25, level + 0.62, count, color=GREY, fontsize=7.5, va="center", ha="right"
            )
            heights[name] = level + 0.5
    return heights


def arrows(ax: Axes, heights: dict[str, float]) -> None:
    """Draw an arc between layers; its width grows with the number of imports."""
    counts = Counter(
        (heights[package_of(name)], heights[package_of(target)])
        for name, targets in all_imports().items()
        for target, _, _ in targets
        if package_of(name) in heights and package_of(target) in heights
    )
    for (above, below), count in counts.items():
        if above <= below or count < MANY:
            continue
        arc = FancyArrowPatch(
            (-0.05, above), (-0.05, below), connectionstyle=f"arc3,rad={0.18 + 0.25 / (above - below):.2f}",
            arrowstyle="-|>,head_length=4,head_width=2", linewidth=0.4 + 0.12 * count**0.5, color=BLUE, alpha=0.45,
        )  # fmt: skip
        ax.add_patch(arc)


def main() -> None:
    """Draw the figure."""
    figure = new_figure(8.0, 0.62 * len(SHOWN) + 0.5)
    ax = figure.add_subplot()
    arrows(ax, boxes(ax))
    ax.set(xlim=(-1.4, WIDTH), ylim=(-0.1, len(SHOWN) + 0.1))
    ax.axis("off")
    figure.savefig(OUT)
    print(OUT)


if __name__ == "__main__":
    main()
