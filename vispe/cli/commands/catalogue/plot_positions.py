"""`vispe plot positions`: figure of the coordinates that schemes assign to the tokens of a stream."""

from vispe.evaluate.plots.positions import EXAMPLE

POSITIONALS = ("schemes",)
SHORT = {"out": "-o"}


def plot_positions(
    schemes: list[str], out: str, stream: str = EXAMPLE, force: bool = False, json: bool = False
) -> None:
    """Plot the coordinates that position schemes assign to text, images and videos.

    Top: time, row and column of every token in order. Bottom: the tokens in space, where text is the diagonal. The
    diamond is the next text token. Schemes are drawn side by side with common scales.

    Args:
        schemes: one or more position schemes, such as mrope_i or 'mrope_i(spatial_reset=true)'.
        out: figure file, for example positions.png; the suffix selects the format.
        stream: segments in order: text:6, image:4x6 (rows x columns of tokens), image:4x4*2x3+last (tiles and a
            thumbnail), video:3x4x4@0.5 (frames x rows x columns, seconds between frames), shared:3 (one of
            several answers), text:6. (ends a segment), text:2@1,3 (refers to row 1, column 3 of the image),
            text:2@0,0,2,3 (to a box of it).

    Examples:
        vispe plot positions mrope_i 'mrope_i(spatial_reset=true)' -o positions.png
        vispe plot positions rope1d mrope --stream 'text:6 image:4x4*2x2+last text:4 video:9x2x3 text:3' -o tiles.svg
    """
    from json import dumps
    from pathlib import Path

    from vispe.cli.common import write
    from vispe.evaluate.plots.positions import plot_positions as draw
    from vispe.utils.files import check_writable

    path = Path(out)
    check_writable([path], force)
    write(path, draw(schemes, stream)[0].figure, force)
    print(dumps({"schemes": schemes, "stream": stream, "out": str(path)}) if json else f"{path}")
