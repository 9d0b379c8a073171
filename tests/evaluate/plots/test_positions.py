"""The figures show the coordinates of the stream, and `vispe plot positions` writes them."""

import json

import numpy as np
import pytest
import torch

from vispe.cli.main import main
from vispe.errors import OptionError, ShapeError, UnknownName
from vispe.multimodal import Image, Stream, Text, Video, create_scheme, list_schemes
from vispe.multimodal.streams.segments import Segment
from vispe.multimodal.streams.stream_text import parse_segments

pytest.importorskip("matplotlib", reason="vispe[cli] is not installed")
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import to_rgb

from vispe.evaluate.plots.plotted_scheme import COLOURS
from vispe.evaluate.plots.positions import EXAMPLE, plot_positions
from vispe.utils.report.figure_style import GREY, INK

TILED = "text:3 image:2x3*2x2+last text:2 video:2x2x2 text:2"


@pytest.fixture(autouse=True)
def _closed():
    yield
    pyplot.close("all")


def points(ax, colour):
    """All dots of one colour, sorted."""
    actual = [
        line.get_xydata() for line in ax.lines if line.get_marker() == "o" and line.get_color() == colour
    ]
    return sorted(map(tuple, np.concatenate(actual).tolist())) if actual else []


def words(ax):
    return [t.get_text() for t in ax.texts]


def test_lines_are_the_coordinates():
    ax = plot_positions("mrope_i(spatial_reset=true)", TILED)
    stream = Stream.of([parse_segments(TILED)])
    ids = create_scheme("mrope_i(spatial_reset=true)").coordinates(stream).ids[:, 0]
    visual = stream.blocks.visual[stream.block]
    for axis, colour in enumerate(COLOURS[:3]):
        expected = [(i, v) for i, v in enumerate(ids[axis].tolist()) if visual[i]]
        assert points(ax, colour) == expected
    assert points(ax, INK) == [(i, v) for i, v in enumerate(ids[0].tolist()) if not visual[i]]
    (diamond,) = {tuple(line.get_xydata()[0]) for line in ax.lines if line.get_marker() == "D"}
    assert diamond == (len(visual), float(ids[0, -1]) + 1)
    assert words(ax) == [
        "2 x 2 tiles of 2 x 3 + thumbnail",
        "video 2 x 2 x 2",
        f"next: {ids[0, -1] + 1:g}",
        "time",
        "row",
        "column",
    ]
    assert ax.get_title(loc="left") == "mrope_i(spatial_reset=true)"
    cuts = sorted(line.get_xdata()[0] for line in ax.lines if line.get_color() == "white")
    assert cuts == [8.5, 14.5, 20.5, 26.5, 38.5]


def test_text_off_the_diagonal_has_the_colours_of_its_axes():
    ax = plot_positions("mrope(text_axes=time)", "text:3 image:2x2 text:2")
    assert points(ax, INK) == [(0, 0)]
    assert points(ax, COLOURS[1])[:2] == [(1, 0), (2, 0)]
    assert "next" not in " ".join(words(ax))
    colours = [line.get_markeredgecolor() for line in ax.lines if line.get_marker() == "D"]
    assert colours == list(COLOURS[:3])


def test_text_that_names_cells_stands_where_they_are():
    ax = plot_positions("bilevel", "text:2. image:2x3 text:1 text:2@1,2 text:1")
    assert points(ax, COLOURS[1])[-4:] == [(8, 0), (9, 1), (10, 1), (11, 3)]
    assert points(ax, COLOURS[0])[-4:] == [(8, 2), (9, 1), (10, 1), (11, 2)]
    bands = sorted(p.get_x() for p in ax.patches if p.get_facecolor()[:3] == to_rgb(GREY))
    assert bands == [8.5, 9.5]
    assert words(ax)[-3:] == ["segment", "row", "column"]


def test_space_is_time_row_and_column():
    figure = pyplot.figure()
    ax = figure.add_subplot(projection="3d")
    assert plot_positions("mrope", "text:2 image:2x3 text:1", ax) is ax
    ids = create_scheme("mrope").coordinates(Stream.of([[Text(2), Image(2, 3), Text(1)]])).ids[:, 0]
    x, y, z = ax.collections[0]._offsets3d
    assert np.array_equal(np.stack([z, y, x]), ids[:, 2:8].numpy())
    text = np.stack(ax.lines[1].get_data_3d())
    assert np.array_equal(text[::-1], ids[:, [0, 1, 8]].numpy())
    assert (ax.get_zlabel(), ax.get_ylabel(), ax.get_xlabel()) == ("time", "row", "column")
    assert len({ax.get_xlim(), ax.get_ylim(), ax.get_zlim()}) == 1


@pytest.mark.parametrize(
    ("spec", "names", "rows"),
    [
        ("rope1d", ("position",) * 3, (0, 0, 0)),
        ("vrope", ("down right", "down left", "up right"), (0, 1, 2)),
        ("ppe(k=2)", ("time 1", "row 1", "column 1"), (0, 2, 4)),
    ],
)
def test_schemes_with_other_axes(spec, names, rows):
    axes = plot_positions([spec], EXAMPLE)
    upper, below = axes[0].figure.axes
    assert upper is axes[0]
    assert (below.get_zlabel(), below.get_ylabel(), below.get_xlabel()) == names
    x, y, z = below.collections[0]._offsets3d
    ids = create_scheme(spec).coordinates(Stream.of([parse_segments(EXAMPLE)])).ids[:, 0]
    assert np.array_equal(np.stack([z, y, x]), ids[list(rows), 6:30].numpy())
    assert words(upper)[:2] == ["image 4 x 6", "video 3 x 4 x 4"]


def test_schemes_side_by_side_share_their_scales():
    axes = plot_positions(["mrope_i", "videorope", "rope1d", "vrope", "mousi"])
    assert len({ax.get_ylim() for ax in axes}) == 1
    assert axes[0].get_ylim()[1] > 85
    below = axes[0].figure.axes[1::2]
    assert len({below[i].get_zlim() for i in (0, 1, 3)}) == 1
    assert below[2].get_zlim() != below[0].get_zlim()  # one coordinate: a scale of its own
    left_edges = [round(ax.get_position().x0, 3) for ax in axes]
    assert left_edges[:2] == left_edges[3:]
    assert [bool(ax.get_ylabel()) for ax in axes] == [True, False, False, True, False]


@pytest.mark.parametrize("name", list_schemes())
def test_every_scheme_can_be_drawn(name):
    ax = pyplot.figure().add_subplot()
    plot_positions(name, "text:3 image:2x3 text:2 video:2x2x2@0.5 text:1", ax)
    values = np.concatenate([line.get_ydata() for line in ax.lines if line.get_marker() == "o"])
    assert np.isfinite(values).all()


def test_streams_may_be_segments_or_streams():
    ax = plot_positions(create_scheme("mrope", stride=2.0), [Text(2), Video(3, 1, 1), Text(1)])
    assert ax.get_title(loc="left") == "mrope(stride=2.0)"
    assert points(ax, COLOURS[0]) == [(2, 2), (3, 4), (4, 6)]
    padded = Stream.of([[Text(2), Image(1, 2)]], padding="left", length=7)
    assert points(plot_positions("mrope", padded), INK) == [(0, 0), (1, 1)]


def test_errors():
    with pytest.raises(ShapeError, match="a single sequence, got 2 rows"):
        plot_positions("mrope", Stream.of([[Text(2)], [Text(3)]]))
    with pytest.raises(OptionError, match="spec is empty"):
        plot_positions([])
    with pytest.raises(OptionError, match="ax needs a single scheme, got 2"):
        plot_positions(["mrope", "rope1d"], EXAMPLE, pyplot.figure().add_subplot())
    with pytest.raises(UnknownName, match="no position scheme 'alibi'"):
        plot_positions("alibi")


def test_without_matplotlib(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "matplotlib" else find(n, *a))
    with pytest.raises(ImportError, match=r"drawing positions needs .*'vispe\[cli\]'"):
        plot_positions("mrope")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("text:6", [Text(6)]),
        ("text:6#2 shared:3", [Text(6, group=2), Text(3, shared=True)]),
        ("image:4x6", [Image(4, 6)]),
        (" image:4x6*2x3  image:1x2*1x1+first ", [Image(4, 6, (2, 3)), Image(1, 2, (1, 1), "first")]),
        (
            "video:3x4x5 video:1x2x3@0.5 video:1x2x3@.25",
            [Video(3, 4, 5), Video(1, 2, 3, 0.5), Video(1, 2, 3, 0.25)],
        ),
    ],
)
def test_streams_as_text(text: str, expected: list[Segment]):
    assert parse_segments(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "The stream is empty. Use parts such as"),
        ("txt:4", "the part 'txt:4', which is not one of text, shared, image, video. Did you mean 'text'"),
        ("text", "'text' of the stream cannot be read. Write text:TOKENS, such as text:6"),
        ("image:4", "'image:4' of the stream cannot be read. Write image:ROWSxCOLUMNS"),
        ("image:4x6*2", "'image:4x6*2' of the stream cannot be read"),
        ("video:4x6", "'video:4x6' of the stream cannot be read. Write video:FRAMESxROWSxCOLUMNS"),
        ("video:1x2x3@", "'video:1x2x3@' of the stream cannot be read"),
        ("text:0", "tokens needs an integer above 0, got tokens=0"),
        ("video:1x2x3@0", "seconds needs a number above 0"),
        ("text:²", "'text:²' of the stream cannot be read"),
    ],
)
def test_text_that_is_no_stream(text, message):
    with pytest.raises(OptionError) as error:
        parse_segments(text)
    assert message in str(error.value)


def test_the_command(capsys, tmp_path):
    path = tmp_path / "positions.png"
    assert (
        main(["plot", "positions", "mrope_i", "vrope", "--stream", "text:3 image:2x3", "-o", str(path)]) == 0
    )
    assert capsys.readouterr().out.strip() == str(path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert main(["plot", "positions", "mrope_i", "-o", str(path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["plot", "positions", "mrope_i", "-o", str(path), "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schemes": ["mrope_i"],
        "stream": EXAMPLE,
        "out": str(path),
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["positions", "mrop", "-o", "x.png"], "no position scheme 'mrop'. Did you mean 'mrope'"),
        (
            ["positions", "mrope", "--stream", "image:4", "-o", "x.png"],
            "'image:4' of the stream cannot be read",
        ),
        (["positions", "mrope", "--grid", "4x4", "-o", "x.png"], "plot positions has no option '--grid'"),
        (["positions", "-o", "x.png"], "plot positions: missing required argument SCHEMES"),
        (["positions", "mrope", "-o", "x.doc"], "x.doc: unsupported figure format"),
        (["mrope_i(stride=2.0)", "-o", "x.png"], "Use vispe plot positions 'mrope_i(stride=2.0)'"),
        (["alibi2", "-o", "x.png"], "There is no encoding 'alibi2'"),
    ],
)
def test_mistakes_in_the_command(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_drawing_does_not_change_random_numbers():
    before = torch.get_rng_state()
    plot_positions("v2pe")
    assert torch.equal(before, torch.get_rng_state())


def test_long_sequences_have_small_dots_and_names_that_do_not_touch():
    images = [Image(12, 16), Text(10), Image(8, 8), Text(10), Video(20, 6, 6), Text(15)]
    ax = plot_positions("mrope", [Text(20), *images])
    assert [w for w in words(ax) if " x " in w] == ["image 12 x 16", "video 20 x 6 x 6"]
    assert max(line.get_markersize() for line in ax.lines if line.get_marker() == "o") < 2
    ax = plot_positions("mrope", [Text(4), Image(5, 5), Text(3), Image(2, 7), Text(90)])
    assert [w for w in words(ax) if " x " in w] == ["image 5 x 5", "2 x 7"]
    boxes = [t.get_window_extent() for t in ax.texts if " x " in t.get_text()]
    assert boxes[0].x1 < boxes[1].x0
