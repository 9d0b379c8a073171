"""Write the computed tables of the pages on position schemes, and draw their figures.

python eval/docs_multimodal.py [tables] [figures]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import checkout  # noqa: F401  (finds vispe)

from vispe.hosts.transformers.language.families import FAMILIES
from vispe.hosts.transformers.language.families.patches import FRAMES
from vispe.multimodal import Image, Parallel, Stream, Text, create_scheme, list_schemes
from vispe.multimodal.properties import SchemeProperties, properties

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "how-to" / "models"
TABLES = {"multimodal.md": ("families",), "schemes.md": ("cost", "position")}  # tables of each page
VARIANTS = {  # rows below the row of their scheme
    "mousi": ["mousi(share=all)"],
    "mrope": ["mrope(after=side)", "mrope(text_axes=time)", "mrope(tokens_per_second=2.0)"],
    "mrope_i": ["mrope_i(spatial_reset=true)"],
    "v2pe": ["v2pe(per=picture)"],
    "videorope": ["videorope(after=max)"],
}
DRAWN = ("mrope_i", "mrope_i(spatial_reset=true)", "videorope", "circlerope", "vrope", "v2pe(stride=4)")
COUNT = re.compile(r"\d+ model types\b")
COUNTING = ("README.md", "docs/index.md")  # pages that name the number of model types, without tables
SEGMENTS = ("bilevel", "mrope_i", "rope1d")  # drawn with sentences, and with text that names a cell and a box
NAMING = "text:5. text:7. image:4x6 text:3 text:4@1,4 text:3 text:4@2,0,3,1 text:5"
COST = ("scheme", "text exact", "integers", "decode-safe", "an image costs", "a video costs",
        "grows with the image", "image of 24 x 36", "2 x 3 tiles of 16 x 16 + thumbnail",
        "video of 16 x 12 x 18")  # fmt: skip
POSITION = ("scheme", "moves with the text before", "text after an image", "text after a long video",
            "distinct tokens in image", "in tiles", "in video", "mirror", "level", "seconds count",
            "random in training")  # fmt: skip


def families() -> str:
    """Return the table of model families; requires transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    rows: dict[tuple[str, ...], list[str]] = {}
    for name, family in FAMILIES.items():
        own = str(family.own(CONFIG_MAPPING[name]()))
        videos = FRAMES if family.separate_frames else family.images.videos
        rows.setdefault((family.images.text, videos, f"`{own}`"), []).append(f"`{name}`")
    heads = ("model types", "how images are located", "videos", "trained with")
    return _table(heads, [[", ".join(names), *key] for key, names in rows.items()])


def specs() -> list[str]:
    """Return the specs of all rows: every scheme, and variants of some."""
    return [spec for name in list_schemes() for spec in (name, *VARIANTS.get(name, ()))]


def tables(schemes: list[SchemeProperties]) -> dict[str, str]:
    """Return the tables by name."""
    return {
        "cost": _table(COST, [_cost(p) for p in schemes]),
        "position": _table(POSITION, [_position(p) for p in schemes]),
    }


def updated(name: str, page: str) -> str:
    """Return the text of a page with its tables recomputed."""
    names = TABLES[name]
    made = {"families": families()} if "families" in names else tables([properties(spec) for spec in specs()])
    for table in names:
        marks = rf"(<!-- {table}: made by eval/docs_multimodal.py -->\n\n).*?(\n\n<!-- end of {table} -->)"
        page, count = re.subn(marks, lambda m, text=made[table]: m[1] + text + m[2], page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{name} has {count} markers for the table {table}; it needs one.")
    return counted(page)


def counted(page: str) -> str:
    """Return the text of a page with the number of model types."""
    return COUNT.sub(f"{len(FAMILIES)} model types", page)


def figures() -> None:
    """Draw the coordinates of two streams for a few schemes."""
    import matplotlib

    matplotlib.use("Agg")
    from vispe.evaluate.plots.positions import EXAMPLE, plot_positions

    for name, specs, stream in (("positions", DRAWN, EXAMPLE), ("segments", SEGMENTS, NAMING)):
        axes = plot_positions(specs, stream)
        axes[0].figure.savefig(ROOT / "docs" / "figures" / f"multimodal-{name}.png", dpi=110)
    parallel_figure()


def parallel_figure() -> None:
    """Draw coordinates and masks of images in order, and of parallel images in two ways."""
    from matplotlib import pyplot

    from vispe.evaluate.plots.attention_blocks import plot_blocks
    from vispe.evaluate.plots.positions import plot_positions

    images = [Image(3, 4), Image(3, 3), Image(4, 4)]
    ways = {
        "in order": images,
        "parallel='graph_kv'": [Parallel(images)],
        "parallel='pine'": [Parallel(images, see="all", align="end")],
    }
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7.6), dpi=95, height_ratios=(1, 1.35))
    for (title, middle), upper, lower in zip(ways.items(), *axes, strict=True):
        stream = Stream.of([[Text(5), *middle, Text(6)]])
        plot_positions("mrope_i", stream, upper)
        upper.set_title(title, loc="left", pad=17)
        upper.set_ylim(-1, 27)
        plot_blocks(stream, lower)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "figures" / "multimodal-parallel.png", dpi=110)


def _table(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


def _cost(p: SchemeProperties) -> list[str]:
    tiles = "refused" if p.tiles_cost is None else f"{p.tiles_cost:.4g}"
    return [f"`{p.scheme}`", _yes(p.text_exact), _yes(p.whole), _yes(p.decode_safe), p.image, p.video, _yes(p.grows),
            f"{p.image_cost:.4g}", tiles, f"{p.video_cost:.4g}"]  # fmt: skip


def _position(p: SchemeProperties) -> list[str]:
    first = "sequence" if create_scheme(p.scheme).numbers_tokens else "time"
    follows = "yes" if all(p.follows_text) else f"{first} only" if p.follows_text[0] else "no"
    tiles = "refused" if p.distinct_tiles is None else _yes(p.distinct_tiles)
    return [f"`{p.scheme}`", follows, _range(p.image_gap), _range(p.video_gap), _yes(p.distinct_image), tiles,
            _yes(p.distinct_video), _yes(p.mirrored), _yes(p.level), _yes(p.timed), _yes(p.random)]  # fmt: skip


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _range(gap: tuple[float, float]) -> str:
    low, high = (f"{v:+.3g}" for v in gap)
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["tables", "figures"]
    if "tables" in chosen:
        for name in TABLES:
            page = PAGES / name
            page.write_text(updated(name, page.read_text()))
        for name in COUNTING:
            page = ROOT / name
            page.write_text(counted(page.read_text()))
    if "figures" in chosen:
        figures()
