"""`vispe plot`: figure of an encoding. `vispe plot positions` is in plot_positions.py."""

POSITIONALS = ("spec",)
SHORT = {"out": "-o"}


def plot(
    spec: str,
    out: str,
    grid: str = "16x16",
    query: list[int] | None = None,
    head: int | None = None,
    num_heads: int = 8,
    layer: int = 0,
    force: bool = False,
    json: bool = False,
) -> None:
    """Plot the attention bias or similarity that an encoding produces around a query patch.

    See `vispe plot positions --help` for the positions of text, images and videos.

    Args:
        spec: name, preset, or name(option=value, ...) of the encoding.
        out: figure file, for example bias.png; the suffix selects the format.
        grid: grid of patches, rows x columns.
        query: row and column of the query patch; default the centre.
        head: index of the head; default the mean over heads.
        num_heads: number of heads of the hypothetical model.
        layer: block of the hypothetical model.

    Examples:
        vispe plot alibi2d.geometric -o bias.png
        vispe plot 'alibi2d(wrap=false)' --grid 14x20 --query 3,4 --head 0 -o bias.svg
    """
    import re
    from json import dumps
    from pathlib import Path

    import vispe.multimodal  # noqa: F401  (registers the names of schemes)
    from vispe.cli.common import write
    from vispe.encodings.spec import SCHEME_NAMES
    from vispe.errors import OptionError, UnknownEncoding, UnknownName
    from vispe.evaluate.plots.encoding import plot_bias
    from vispe.utils.files import check_writable

    sides = re.fullmatch(r"(\d+)x(\d+)", grid)
    if sides is None:
        raise OptionError(f"plot: --grid is rows x columns, such as 14x20, got {grid!r}.")
    if query is not None and len(query) != 2:
        raise OptionError(f"plot: --query is a row and a column, such as 3,4, got {query}.")
    path = Path(out)
    check_writable([path], force)
    try:
        size, position = (int(sides[1]), int(sides[2])), None if query is None else (query[0], query[1])
        axes = plot_bias(spec, size, position, head=head, num_heads=num_heads, layer=layer)
    except UnknownEncoding:
        if spec.partition("(")[0] not in SCHEME_NAMES:
            raise
        raise UnknownName(
            f"plot: {spec} is a position scheme for text, images and videos. Use vispe plot positions {spec!r}."
        ) from None
    write(path, axes.figure, force)
    print(dumps({"spec": spec, "out": str(path)}) if json else f"{path}")
