"""Figures show the numbers of their rows, at their positions; missing values are left blank."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from tests.evaluate.rotation import rows as example_rows
from tests.evaluate.rotation.rows import NAN, POSES, report, result, row
from vispe.errors import InputError
from vispe.evaluate.rotation.figures import record_figures
from vispe.evaluate.rotation.figures.image_grids import fingerprint_words
from vispe.evaluate.rotation.figures.model_comparison import measurements
from vispe.evaluate.rotation.metrics.quadrant_gap import QUADRANTS
from vispe.utils.report.figure_style import short_number


def axes(polar=False):
    return Figure(dpi=60).add_subplot(projection="polar" if polar else None)


def render(ax):
    """Draw a figure, so that errors of matplotlib are raised; return the axes."""
    ax.figure.canvas.draw()
    return ax


def words(artist):
    """All text of axes or a figure."""
    actual = artist.findobj(mpl.text.Text)
    return [t.get_text() for t in actual if t.get_text()]


def labels(ax):
    return ax.get_legend_handles_labels()[1]


def bars(ax, word):
    """The bars with that legend: centres, bottoms and heights."""
    (actual,) = [c for c in ax.containers if word in c.get_label()]
    at = [(p.get_x() + p.get_width() / 2, p.get_y(), p.get_height()) for p in actual.patches]
    return np.array(at).T


def line(ax, word):
    (actual,) = [x for x in ax.lines if str(x.get_label()) == word]
    return actual


def error_bars(ax):
    return [s for c in ax.collections if isinstance(c, LineCollection) for s in c.get_segments()]


def test_polar_shows_value_floor_and_effect_at_every_angle():
    actual = result(example_rows.angle_rows())
    ax = render(record_figures.plot_polar(actual, axes(polar=True)))
    angles = np.arange(0, 360, 15)
    value = np.where(angles == 0, 0, 0.5 + 0.001 * angles)
    floor = np.where(angles % 90 == 0, 0, 0.3)  # the largest of the floors
    theta, bottom, height = bars(ax, "floor")
    np.testing.assert_allclose(theta, np.deg2rad(angles))
    np.testing.assert_allclose(bottom, 0)
    np.testing.assert_allclose(height, floor)
    _, bottom, height = bars(ax, "effect")
    np.testing.assert_allclose(bottom, floor)
    np.testing.assert_allclose(height, value - floor, atol=1e-12)
    dots = line(ax, "mean of 6 images, lines: 95 % interval")
    np.testing.assert_allclose(dots.get_xdata(), np.deg2rad(angles))
    np.testing.assert_allclose(dots.get_ydata(), value, atol=1e-12)
    intervals = actual.rows[5].summary().interval
    np.testing.assert_allclose(error_bars(ax)[4][:, 1], intervals)
    assert ax.get_ylim()[0] == 0
    assert ax.get_ylim()[1] > value.max()
    tilted = value[angles % 90 != 0].mean()
    assert f"off multiples of 90°: {tilted:.2f} on average, {tilted - 0.3:.2f} beyond resampling" in words(ax)
    assert "Equivariance error (centred) by angle" in words(ax)


def test_polar_of_consistency_hangs_from_one():
    ax = render(
        record_figures.plot_polar(
            result(example_rows.angle_rows(metric="miou")), axes(polar=True), metric="miou"
        )
    )
    angles = np.arange(0, 360, 15)
    floor = np.where(angles % 90 == 0, 1, 0.98)
    _, bottom, height = bars(ax, "lost by resampling alone")
    np.testing.assert_allclose(bottom, floor)
    np.testing.assert_allclose(bottom + height, 1)
    _, bottom, height = bars(ax, "lost beyond it")
    np.testing.assert_allclose(bottom, 0.9 - 0.001 * angles)
    np.testing.assert_allclose(bottom + height, floor)
    assert ax.get_ylim() == (0, 1)


def test_polar_of_accuracy_is_compared_with_the_pose_at_rest():
    rows = example_rows.angle_rows(metric="accuracy", part="trained on all poses")
    ax = record_figures.plot_polar(
        result(rows), axes(polar=True), metric="accuracy", part="trained on all poses"
    )
    _, bottom, height = bars(render(ax), "lost against 0°")
    np.testing.assert_allclose(bottom + height, 0.9)
    assert "0.90 at 0°, 0.55 to 0.90" in words(ax)
    assert "mIoU against the truth by angle" in words(ax)


def test_polar_with_one_image_a_missing_number_and_few_angles():
    values = ((0, 0.0, 0.0), (30, NAN, NAN), (90, 0.4, 0.0), (350, 0.1, 0.3))
    rows = [row("angle", "error", value, 1, amount=(a,), blur=floor) for a, value, floor in values]
    ax = render(record_figures.plot_polar(result(rows, 1), axes(polar=True)))
    assert len(line(ax, "1 image").get_xdata()) == 3
    assert error_bars(ax) == []
    theta, _, height = bars(ax, "effect")
    np.testing.assert_allclose(np.rad2deg(theta), [0, 30, 90, 350])
    np.testing.assert_allclose(height, [0, 0, 0.4, 0])  # below the floor there is no effect to draw
    widths = {round(p.get_width(), 9) for c in ax.containers for p in c.patches}
    assert widths == {round(0.92 * np.deg2rad(10), 9)}  # the gap between 350° and 0° counts too
    every = render(
        record_figures.plot_polar(result([row("angle", "error", NAN, 2, amount=(90,))], 2), axes(polar=True))
    )
    assert "only multiples of 90°, which are exact" in words(every)


def test_polar_needs_polar_axes_and_rows():
    with pytest.raises(InputError, match=r"must be polar axes.*got axes of type 'rectilinear'"):
        record_figures.plot_polar(result(example_rows.angle_rows()), axes())
    with pytest.raises(
        InputError, match=r"no rows of 'ari' at angles to draw\. Measure them with angle_equi"
    ):
        record_figures.plot_polar(result(example_rows.angle_rows()), axes(polar=True), metric="ari")
    with pytest.raises(InputError, match=r"must be plain axes, got axes of type 'polar'"):
        record_figures.plot_d4(result(example_rows.d4_rows()), axes(polar=True))


def test_d4_shows_both_errors_side_by_side_and_the_controls():
    ax = render(record_figures.plot_d4(result(example_rows.d4_rows()), axes()))
    full, position = bars(ax, "image transformed: 0.70"), bars(ax, "position code alone: 0.20")
    np.testing.assert_allclose(full[2], 0.4 + 0.1 * np.arange(7))
    np.testing.assert_allclose(position[2], 0.1 + 0.05 * np.arange(7))
    assert (full[0] < position[0]).all()
    np.testing.assert_allclose((full[0] + position[0]) / 2, np.arange(7), atol=1e-12)
    assert [t.get_text() for t in ax.get_xticklabels()] == POSES
    heights = {str(t.get_text()): t.xy[1] for t in ax.texts if hasattr(t, "xy")}
    assert heights["identity"] == pytest.approx(0)
    assert heights["random\nweights"] == pytest.approx(0.8)
    assert heights["unrelated"] == pytest.approx(2**0.5)
    assert len(error_bars(ax)) == 14
    assert ax.get_ylim()[0] == 0


def test_d4_leaves_gaps_and_says_what_is_exact():
    rows = [
        r for r in example_rows.d4_rows(2) if r.part == "full" and r.transform not in ("rot180", "identity")
    ]
    ax = render(record_figures.plot_d4(result([*rows, row("D4", "error", 1e-7, 2, "position code"),
                                     row("hflip", "error", NAN, 2, "position code"),
                                     row("vflip", "error", 0.0, 2, "position code")], 2), axes()))  # fmt: skip
    heights = bars(ax, "image transformed")[2]
    assert np.isnan(heights[1])
    assert np.isfinite(np.delete(heights, 1)).all()
    assert "position code alone: 1e-7" not in labels(ax)  # the spread of this row is 0.01
    assert np.isnan(bars(ax, "position code alone")[2]).sum() == 6
    assert error_bars(ax) == []
    assert "identity" not in words(ax)
    tiny = [row(g, "error", 1e-7, 1, "position code") for g in ("D4", "rot90")]
    exact = [*(r for r in example_rows.d4_rows(1) if r.part == "full"), *tiny]
    ax = record_figures.plot_d4(result(exact, 1), axes())
    assert "position code alone: 1e-7 (exact)" in labels(ax)
    assert "exact at every pose" not in words(ax)  # the other part is not
    assert "exact at every pose" in words(record_figures.plot_d4(result(tiny, 1), axes()))


def test_d4_of_labels():
    ax = render(record_figures.plot_d4(result(example_rows.label_rows()), axes(), metric="miou"))
    np.testing.assert_allclose(bars(ax, "labels: 0.90")[2], 0.9)
    np.testing.assert_allclose(bars(ax, "clusters of features: 0.80")[2], 0.8)
    assert ax.get_ylim() == (0, 1.05)
    with pytest.raises(InputError, match="at the poses of D4"):
        record_figures.plot_d4(result(example_rows.d4_rows()), axes(), metric="miou")


def test_layers_share_an_axis_and_nothing_readable_is_zero():
    ax = render(record_figures.plot_layers(result(example_rows.layer_rows()), axes()))
    np.testing.assert_allclose(line(ax, "error, image transformed").get_ydata(), 0.1 * np.arange(1, 6))
    np.testing.assert_allclose(line(ax, "error, position code alone").get_ydata(), 0.05 * np.arange(5))
    r2 = line(ax, "R² of row and column")
    np.testing.assert_allclose(r2.get_ydata(), [0, 0, 0.1, 0.3, 0.5], atol=1e-12)
    (hollow,) = [x for x in ax.lines if x.get_markerfacecolor() == "white"]
    assert list(hollow.get_xdata()) == [0, 1]
    assert {"invariant", "mild", "strong", "mean of 6 images, shaded: 95 % interval"} <= set(words(ax))
    assert ax.get_ylim()[0] == 0
    rows = [r for r in example_rows.layer_rows(1) if r.metric == "error" and r.part != "layer 2"]
    ax = render(record_figures.plot_layers(result(rows, 1), axes()))
    assert list(line(ax, "error, image transformed").get_xdata()) == [0, 1, 3, 4]
    assert labels(ax) == ["error, image transformed", "error, position code alone"]
    assert "1 image" in words(ax)
    with pytest.raises(InputError, match="rows after blocks"):
        record_figures.plot_layers(result(example_rows.d4_rows()), axes())


def test_translation_orders_shifts_and_marks_whole_patches():
    ax = render(record_figures.plot_translation(result(example_rows.shift_rows(), patch=4), axes()))
    ticks = [t.get_text() for t in ax.get_xticklabels()]
    assert ticks == ["1", "2", "3", "4", "12"]
    (marked,) = [c for c in ax.containers if c.get_label() == "whole patches"]
    assert [round(p.get_x() + p.get_width() / 2) for p in marked.patches] == [3, 4]
    lines = [x for x in ax.lines if x.get_linestyle() == "-" and len(x.get_xdata())]
    np.testing.assert_allclose(lines[0].get_ydata(), [0.1, 0.2, 0.3, 0.4, 1.2])
    np.testing.assert_allclose(lines[1].get_ydata(), [0.05, 0.1, 0.15, 0.2])
    dots = [x for x in ax.lines if x.get_linestyle() == "None"]
    assert [len(x.get_xdata()) for x in dots] == [7, 6]
    assert {"rolled around", "window moved", "whole patches"} == set(labels(ax))
    assert len(error_bars(ax)) == 13
    without_patch = render(
        record_figures.plot_translation(result([row("roll", "error", NAN, 1, amount=(0, -3))], 1), axes())
    )
    assert [t.get_text() for t in without_patch.get_xticklabels()] == ["3"]
    assert without_patch.get_ylim()[0] == 0
    second = record_figures.plot_translation(result(example_rows.shift_rows()), axes(), patch_size=3)
    (marked,) = [c for c in second.containers if c.get_label() == "whole patches"]
    assert [round(p.get_x() + p.get_width() / 2) for p in marked.patches] == [2, 4]


def test_quadrants_next_to_their_control():
    ax = render(record_figures.plot_quadrants(result(example_rows.quadrant_rows()), axes()))
    corner, everywhere = bars(ax, "in that corner")[2], bars(ax, "everywhere")[2]
    np.testing.assert_allclose(corner, [-0.2, -0.1, -0.2, -0.3, -0.4])
    assert np.isnan(everywhere[0])
    np.testing.assert_allclose(everywhere[1:], [-0.075, -0.025, 0.025, 0.075])
    assert [t.get_text() for t in ax.get_xticklabels()] == ["mean of four", *QUADRANTS]
    low, high = ax.get_ylim()
    assert low == -high
    one = [row("top right", "quadrant_gap", NAN, 1)]
    assert np.isnan(
        bars(render(record_figures.plot_quadrants(result(one, 1), axes())), "in that corner")[2]
    ).all()


def test_the_fingerprint_in_plain_words():
    for snr, sentence in ((0.9, "no pattern"), (2.0, "a faint pattern"), (80.0, "a clear pattern"),
                      (float("inf"), "do not depend on the image"), (NAN, "cannot be judged")):  # fmt: skip
        assert sentence in fingerprint_words(example_rows.print_(snr))
    figure = record_figures.plot_fingerprint(example_rows.print_(notes=("Only 7 images.",)))
    figure.canvas.draw()
    actual = words(figure)
    assert {"Component 1: 50 %", "Component 2: 30 %", "Component 3: 10 %", "Only 7 images."} <= set(actual)
    *maps, channels = [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]
    for ax, part in zip(maps, example_rows.print_().components, strict=True):
        np.testing.assert_array_equal(ax.images[0].get_array(), part)
    assert len({ax.images[0].get_clim() for ax in maps}) == 1  # one scale
    assert [t.get_text() for t in channels.get_xticklabels()] == ["1", "0", "2"]  # best first, without NaN
    np.testing.assert_allclose([p.get_height() for p in channels.patches], [0.9, 0.2, 0])
    record_figures.plot_fingerprint(example_rows.print_(components=1, d=3)).canvas.draw()


def poses(shape=(4, 6)):
    labels = np.zeros((*shape, 3))
    return {"identity": labels, **{g: labels + 0.1 * k for k, g in enumerate(POSES)}}


def test_poses_are_shown_with_their_differences_on_one_scale():
    image = np.full((8, 12, 3), 0.5)
    figure = record_figures.plot_poses(report(picture=image, poses=poses()))
    figure.canvas.draw()
    panel = {ax.get_title(loc="left"): ax for ax in figure.axes if ax.images}
    assert set(panel) >= {"the image", "its features", *POSES}
    np.testing.assert_array_equal(panel["vflip"].images[0].get_array(), poses()["vflip"])
    off = [ax for title, ax in panel.items() if title.startswith("off by")]
    assert len(off) == 7
    np.testing.assert_allclose([ax.images[0].get_clim() for ax in off], [(0, 0.6)] * 7)
    np.testing.assert_allclose(panel["off by 0.30"].images[0].get_array(), 0.3)
    exact = record_figures.plot_poses(report(poses={"identity": image, "rot90": image + 1e-9}))
    assert [ax.images[0].get_clim() for ax in exact.axes if ax.get_title(loc="left").startswith("off")] == [
        (0, 0.1)
    ]
    with pytest.raises(InputError, match="maps of poses"):
        record_figures.plot_poses(report())


def test_labels_in_every_pose_and_names_that_look_like_markup():
    labels = np.tile(np.array([[0, 1, 2, 2]]), (4, 1))
    other = labels.copy()
    other[:, 0] = 23  # a quarter of the pixels, and a class beyond the palette
    names = ("$\\frac", "_hidden")
    figure = record_figures.plot_label_poses(report(labels={"identity": labels, "rot90": other}, names=names))
    figure.canvas.draw()
    actual = words(figure)
    assert {"its labels", "rot90", "25.0 % changed", *names, "class 3", "class 23"} <= set(actual)
    (panel,) = [ax for ax in figure.axes if ax.get_title(loc="left") == "its labels"]
    colours = np.asarray(panel.images[0].get_array())
    np.testing.assert_array_equal(colours[:, 0], 1)  # no data is white
    np.testing.assert_allclose(colours[0, 1] * 255, (0x00, 0x72, 0xB2))
    (changed,) = [ax for ax in figure.axes if ax.get_title(loc="left").endswith("changed")]
    different = np.ptp(np.asarray(changed.images[0].get_array()), axis=-1) > 0.5
    np.testing.assert_array_equal(different, labels != other)


def test_models_are_sorted_and_split():
    good = [row("D4", "error", 0.01), row("D4", "error", 0.0, part="position code"), row("none", "r2", -0.4)]
    bad = [*example_rows.d4_rows(), *example_rows.angle_rows(), *example_rows.position_rows()]
    models = {"bad $x": result(bad), "unknown": [row("none", "r2", 0.9)], "good": result(good).to_dict(),
              "rows": result([row("D4", "error", 0.2, 2)], 2).to_dict()["rows"]}  # fmt: skip
    figure = record_figures.plot_models(models)
    figure.canvas.draw()
    left, middle, right = figure.axes
    assert [t.get_text() for t in left.get_yticklabels()] == ["good", "rows", "bad $x", "unknown"]
    np.testing.assert_allclose(line(left, "image transformed").get_xdata(), [0.01, 0.2, 0.7, NAN])
    np.testing.assert_allclose(line(left, "position code alone").get_xdata(), [0, NAN, 0.2, NAN], atol=1e-12)
    np.testing.assert_allclose(middle.lines[0].get_xdata(), [NAN, NAN, 0.3, NAN])
    np.testing.assert_allclose(right.lines[0].get_xdata(), [0, NAN, 0.4, 0.9], atol=1e-12)
    (hollow,) = [x for x in right.lines if x.get_markerfacecolor() == "white"]
    assert list(hollow.get_ydata()) == [0]
    assert left.get_xlim()[0] == 0
    assert right.get_xlim() == (0, 1)
    assert [t.get_text() for t in middle.texts] == ["not measured"] * 3
    for ax in (left, right):
        assert {"invariant", "mild", "strong"} <= {t.get_text() for t in ax.texts}
        assert {0.05, 0.3} <= {float(x.get_xdata()[0]) for x in ax.lines if len(x.get_xdata()) == 2}
    with pytest.raises(InputError, match="no error over D4 to draw"):
        record_figures.plot_models({"a": [row("none", "r2", 0.1)]})


def test_rows_of_a_file_are_those_that_were_written():
    rows = [*example_rows.angle_rows(3), row("D4", "error", NAN, 3, "full", True)]
    for source in (result(rows, 3), result(rows, 3).to_dict(), result(rows, 3).to_dict()["rows"], rows):
        loaded = measurements(source)
        for a, b in zip(loaded, rows, strict=True):
            assert (a.transform, a.metric, a.part, a.control, set(a.floors)) == (
                b.transform, b.metric, b.part, b.control, set(b.floors))  # fmt: skip
            np.testing.assert_array_equal(a.values, b.values)
            for name, floor in a.floors.items():
                np.testing.assert_array_equal(floor, b.floors[name])
    with pytest.raises(InputError, match=r"need the keys metric, values, got transform"):
        measurements([{"transform": "D4"}])
    with pytest.raises(InputError, match="must have 'rows', got none"):
        measurements({"verdict": ""})


def test_numbers_in_figures():
    assert [short_number(v) for v in (0.0, 0.123, -2.0, 3e-7, NAN)] == ["0.00", "0.12", "-2.00", "3e-7", "-"]


def test_a_figure_is_made_when_no_axes_are_given():
    from matplotlib import pyplot

    ax = record_figures.plot_d4(result(example_rows.d4_rows()))
    assert record_figures.plot_polar(result(example_rows.angle_rows())).name == "polar"
    assert ax.figure.number in pyplot.get_fignums()
    pyplot.close("all")
