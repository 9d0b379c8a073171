import dataclasses

import numpy as np
import pytest

from vispe.errors import OptionError
from vispe.evaluate.probe.baselines import probe_baselines
from vispe.evaluate.probe.figures.baseline_figures import baselines_figure, plot_probe_baselines
from vispe.evaluate.probe.figures.curves import plot_probe_channels, plot_probe_layers
from vispe.evaluate.probe.figures.html_report import SourceProbe, best_block, layers_figure, probe_page
from vispe.evaluate.probe.figures.r2_axes import WORDS
from vispe.evaluate.probe.layer_probe import probe_layers
from vispe.evaluate.probe.positional import GRADES, positional_probe
from vispe.evaluate.probe.targets import ramp


def planted(seed, shape=(14, 12), width=16):
    generator = np.random.default_rng(seed)
    maps = [generator.standard_normal((*shape, width)) for _ in range(3)]
    maps[1][..., 5] += 9 * ramp("lr", shape)[..., 0]
    maps[1][..., 11] += 7 * ramp("radial", shape)[..., 0]
    return maps


@pytest.fixture(scope="module")
def source_probe():
    images = [planted(s) for s in range(3)]
    last = [maps[1] for maps in images]
    options = {"step": 2, "masks_per_image": 2}
    return SourceProbe(
        positional_probe(last, targets=("lr", "radial"), **options),
        probe_layers(images, **options),
        probe_baselines(last, blank=[5], **options),
    )


@pytest.fixture
def axes():
    from matplotlib.figure import Figure

    return Figure().add_subplot()


def test_the_curve_holds_every_median_and_the_control(source_probe, axes):
    axes_with_curve = plot_probe_layers(source_probe.layers, axes)
    assert axes_with_curve is axes
    lines = {line.get_label(): line.get_ydata() for line in axes.lines}
    for k, name in enumerate(source_probe.layers.targets):
        expected = np.maximum(np.median(source_probe.layers.r2[:, k], axis=1), -1)
        np.testing.assert_allclose(lines[WORDS[name]], expected)
    control = np.maximum(np.median(source_probe.layers.shuffled[:, 0], axis=1), -1)
    np.testing.assert_allclose(lines["shuffled (control)"], control)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        *(WORDS[name] for name in source_probe.layers.targets), "shuffled (control)",
    ]  # fmt: skip
    assert axes.get_ylim()[0] <= min(line.min() for line in lines.values() if len(line) == 3)


def test_the_channels_that_tell_are_named(source_probe, axes):
    plot_probe_channels(source_probe.layers, 1, axes)
    assert {text.get_text() for text in axes.texts} >= {"5", "11"}
    marks = {line.get_label(): list(line.get_xdata()) for line in axes.lines if len(line.get_xdata())}
    assert 5 in marks[WORDS["lr"]]
    assert 11 in marks[WORDS["radial"]]
    assert "after block 1" in axes.get_title(loc="left")
    assert best_block(source_probe.layers) == 1
    assert len(layers_figure(source_probe.layers).axes) == 2


def test_neighbouring_channels_share_a_label(source_probe, axes):
    curves = np.full((1, 300), -0.2)
    curves[0, [54, 55, 56, 120, 124, 290]] = 0.9, 0.8, 0.7, 0.6, 0.5, 0.4
    layers = dataclasses.replace(source_probe.layers, targets=("ud",), channel_r2=(curves,))
    plot_probe_channels(layers, 0, axes)
    assert [text.get_text() for text in axes.texts] == ["54-56", "120, 124", "290"]


def test_every_remedy_and_image_is_drawn(source_probe, axes):
    table = source_probe.baselines
    plot_probe_baselines(table, "radial", axes)
    k = table.targets.index("radial")
    dots = [np.asarray(c.get_offsets())[:, 0] for c in axes.collections if len(c.get_offsets()) == 3]
    known = [row for row in reversed(table.rows) if row.known]
    for dot, row in zip(dots, known, strict=True):
        np.testing.assert_allclose(dot, np.maximum(row.r2[k], -1))
    words = [text.get_text() for text in axes.texts]
    assert [f"{np.median(row.r2[k]):.2f}" for row in known] == [w for w in words if w[-1].isdigit()]
    assert "  not available, see the notes" in words  # the SVD, for which no black image was given
    assert [label.get_text() for label in axes.get_yticklabels()] == [r.name for r in reversed(table.rows)]
    sheet = baselines_figure(table)
    assert len(sheet.axes) == 3
    cells = [text.get_text() for text in sheet.axes[2].texts]
    assert f"{np.median(table.rows[0].rank):.1f}" in cells


def test_the_page_leads_with_noise_and_holds_every_part(source_probe):
    plain = SourceProbe(positional_probe([planted(9)[0]], targets=("lr",), step=2))
    html = probe_page("a <model>", {"images": source_probe, "noise": plain}).html()
    top, *sections = html.split("<h2>")
    assert "Positional probe: a &lt;model&gt;" in top
    assert plain.probe.verdict[1:] in top
    assert 'class="verdict good"' in top
    titles = [section.split("</h2>")[0] for section in sections]
    assert titles == [
        "3 images", "After every block: 3 images", "Debiasing: 3 images", "1 noise image", "Explanation",
    ]  # fmt: skip
    assert html.count("<img ") == 4
    for part in (source_probe.layers, source_probe.baselines):
        assert part.verdict[1:].replace("'", "&#x27;") in html
    assert "needs a black image" in html
    assert set(source_probe.to_dict()) - set(plain.to_dict()) == {"layers", "baselines"}


def test_pages_and_tones():
    assert [GRADES.tone(score) for score in (0.6, 0.2, -3, float("nan"))] == ["bad", "mild", "good", "plain"]
    with pytest.raises(OptionError, match=r"must have keys of \['noise', 'textures', 'images'\], got \[\]"):
        probe_page("model", {})
