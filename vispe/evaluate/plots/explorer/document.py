"""`vispe.explore`: an interactive figure of encodings as a self-contained HTML document."""

from __future__ import annotations

import json
from functools import cache
from html import escape
from pathlib import Path
from typing import Annotated, Any

from vispe.errors import OptionError, check_flag
from vispe.evaluate.plots.explorer.pairwise_values import explorer_data
from vispe.utils.files import atomic_path
from vispe.utils.interval import Interval
from vispe.utils.option_values import read_option
from vispe.utils.options import NonNegativeInt, PositiveInt

_FIT = """<script>
new ResizeObserver(() => {
  if (window.frameElement) window.frameElement.style.height = `${document.body.offsetHeight + 24}px`;
}).observe(document.body);
</script>
"""  # a notebook shows the whole figure, without a scroll bar
Sides = Annotated[tuple[Annotated[int, Interval(least=2, most=32)], ...], Interval(least=1, most=4)]


def explore(
    *specs: str, sizes: tuple[int, ...] = (8, 16), num_heads: int = 4, layer: int = 0, variants: bool = True
) -> Explorer:
    """Return an interactive figure: drag a query over a grid and see the value of every patch, per head.

    A bias is shown as added to the logits, a rotation as the similarity of equal queries and keys with random
    channels, an additive encoding as the cosine similarity of the added vectors, and several softmaxes as attention
    weights. The figure has a choice of encodings, options and grids, and shows the change if the image is rotated by
    90 degrees. Learned parameters have their initial values (seed 0).

    Args:
        specs: encodings as text: `alibi2d`, `rope_axial(temperature=10)`.
        sizes: sides of square grids in patches, 2 to 32. Encodings are created for the first and evaluated on all.
        num_heads: number of heads, with head_dim 64.
        layer: index of the block.
        variants: add to each name without options its presets, and the values of its options with fixed choices, that
            change the figure.

    Returns:
        An `Explorer`, which notebooks display; `save(path)` writes it as one HTML file.

    Raises:
        OptionError: there is no spec, or an argument is invalid.
        UnknownEncoding: an encoding or preset does not exist.
        UnsupportedCombination: an encoding has no value for each pair of patches (samplers, mixing), or a sum has
            several kinds of them.

    Example:
        >>> explore("alibi2d.local", "rope_axial(temperature=10)", sizes=(4,))
        Explorer of alibi2d.local, rope_axial(temperature=10)
    """
    if not specs or not all(isinstance(spec, str) for spec in specs):
        raise OptionError(f"explore: specs must be encodings as text, got {specs!r}. Use explore('alibi2d').")
    sizes = read_option("sizes", sizes, Sides)
    num_heads = read_option("num_heads", num_heads, PositiveInt)
    layer = read_option("layer", layer, NonNegativeInt)
    check_flag("variants", variants)
    return Explorer(explorer_data(specs, sizes, num_heads, layer, variants))


class Explorer:
    """An interactive figure of encodings, created by `vispe.explore`.

    Args:
        data: encoding, options, kind of values and values by grid, from `explorer_data`.

    Example:
        >>> figure = explore("alibi2d", sizes=(4, 6))
        >>> figure.html.startswith("<!doctype html>"), "http" in figure.html
        (True, False)
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    def __repr__(self) -> str:
        names = [
            name + ("" if options == "default" else options)
            for name, entries in self._data.items()
            for options in entries
        ]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"Explorer of {', '.join(names[:3])}{more}"

    def _repr_html_(self) -> str:
        """Return the document in a frame, so that styles and scripts of a notebook and of the figure are separate."""
        return (
            f'<iframe srcdoc="{escape(self.html)}" title="{escape(repr(self))}" '
            'style="width: 100%; height: 420px; border: 0"></iframe>'
        )

    @property
    def fragment(self) -> str:
        """The figure as HTML to insert into a page: an element, its style, data and script."""
        # "<" would end the script element inside a string
        data = json.dumps(self._data, separators=(",", ":")).replace("<", "\\u003c")
        return (
            f"<style>\n{_asset('explorer.css')}</style>\n"
            '<div class="vispe-explorer"><noscript>This figure needs JavaScript. <code>vispe plot alibi2d -o '
            "bias.png</code> draws the same values.</noscript></div>\n"
            f'<script type="application/json" class="vispe-explorer-data">{data}</script>\n'
            f"<script>\n{_asset('explorer.js')}</script>\n"
        )

    @property
    def html(self) -> str:
        """The figure as a complete HTML document without external requests."""
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(repr(self))}</title>\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            "<style>body { margin: 0.5rem; background: #fff; color: #22282e; font: 15px/1.5 system-ui, sans-serif; }"
            f"</style>\n</head>\n<body>\n{self.fragment}{_FIT}</body>\n</html>\n"
        )

    def save(self, path: str | Path, force: bool = False) -> Path:
        """Write the document as an HTML file and return its path; an existing file is only replaced with `force`.

        Raises:
            InputError: the file exists and not `force`.
        """
        with atomic_path(path, force) as temporary:
            temporary.write_text(self.html, encoding="utf-8")
        return Path(path)


@cache
def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
