"""The widget in Qt's offscreen platform, with napari's layers and viewer model but without its canvas."""

import os
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.live import Live, micrograph
from vispe.segment.live.suggestions import suggest
from vispe.segment.overlays import PALETTE

pytestmark = [
    pytest.mark.slow,  # importing napari and Qt takes seconds
    pytest.mark.filterwarnings("ignore"),  # napari, Qt and pydantic warn about each other
]


@pytest.fixture(scope="module")
def qt():
    """Qt application shared by all tests, with the classes of napari that they need."""
    pytest.importorskip("napari", reason="napari comes with the extra napari")
    platform = os.environ.get("QT_QPA_PLATFORM")
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    with warnings.catch_warnings(action="ignore"):
        try:
            from qtpy.QtWidgets import QApplication
        except ImportError:
            pytest.skip("no Qt binding, such as PyQt6, is installed")
        from napari.components import ViewerModel

        from vispe.segment.napari import layers, samples
        from vispe.segment.napari.widget import SegmentWidget

        app = QApplication.instance() or QApplication([])
    yield SimpleNamespace(app=app, Viewer=ViewerModel, Widget=SegmentWidget, layers=layers, samples=samples)
    os.environ.pop("QT_QPA_PLATFORM")
    if platform is not None:
        os.environ["QT_QPA_PLATFORM"] = platform


def settle(qt, widget) -> None:
    """Process events until timers and threads are idle."""
    end = time.monotonic() + 300
    qt.app.processEvents()
    while widget.busy or widget._timer.isActive():
        assert time.monotonic() < end
        time.sleep(0.005)
        qt.app.processEvents()
    qt.app.processEvents()


def record_requests(widget) -> list:
    """Record the requests of a widget from now on."""
    requests, original = [], widget.session.answers

    def answers(*arguments):
        requests.append(arguments)
        yield from original(*arguments)

    widget.session.answers = answers
    return requests


def halves(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    grey = rng.normal(60, 10, shape)
    grey[..., shape[-1] // 2 :] += 80
    return np.clip(grey, 0, 255).astype(np.uint8)


@pytest.fixture
def make_widget(qt):
    """Factory of a viewer and a widget with one image and filter features."""

    def make(data: np.ndarray, **options):
        viewer = qt.Viewer()
        viewer.add_image(data, name="page", **options)
        widget = qt.Widget(viewer)
        widget.panel.features.setCurrentText("filters")
        return viewer, widget

    return make


def draw(layer, page: tuple[int, ...] = ()) -> None:
    """Paint scribbles of two classes with the brush."""
    h, w = layer.data.shape[-2:]
    layer.brush_size = 3
    for number, column in ((1, w // 4), (2, 3 * w // 4)):
        for row in range(5, h - 5, 2):
            layer.paint((*page, row, column), number)


def test_images_are_labelled_segmented_and_the_model_is_saved(qt, make_widget, tmp_path):
    data = halves(60, 72)
    viewer, widget = make_widget(data, scale=(0.5, 0.5), translate=(3, 4))
    widget.new_labels()
    labels = widget.labels
    assert labels.data.dtype == np.uint8
    assert (labels.selected_label, labels.mode) == (1, "paint")
    assert viewer.layers.selection.active is labels
    np.testing.assert_allclose(labels.colormap.map(np.array([0, 1, 2]))[1:, :3] * 255, PALETTE[:2], atol=0.6)
    widget.panel.show_names(("dark", "bright"))
    draw(labels)
    widget.segment()
    settle(qt, widget)
    expected = Live(micrograph(data), features=FeatureConfig()).update(labels.data)
    classes, uncertainty = viewer.layers["page classes"], viewer.layers["page uncertainty"]
    np.testing.assert_array_equal(classes.data, expected.labels)
    np.testing.assert_array_equal(uncertainty.data, expected.uncertainty)
    for layer in (labels, classes, uncertainty):
        np.testing.assert_array_equal(layer.scale, (0.5, 0.5))
        np.testing.assert_array_equal(layer.translate, (3, 4))
    assert (classes.visible, uncertainty.visible, classes.editable) == (True, False, False)
    assert list(classes.features["class"]) == ["no data", "dark", "bright"]
    assert [layer.name for layer in viewer.layers][-1] == labels.name
    assert viewer.layers.selection.active is labels
    dark = 100 * (expected.labels == 1).mean()
    assert widget.panel.status.text().startswith(f"dark {dark:.1f} %, bright {100 - dark:.1f} % (")
    widget.save(tmp_path / "m.vispe")
    assert "vispe apply can use it" in widget.panel.status.text()

    viewer2, widget2 = make_widget(data)
    widget2.load(tmp_path / "m.vispe")
    settle(qt, widget2)
    np.testing.assert_array_equal(viewer2.layers["page classes"].data, expected.labels)
    assert widget2.panel.names == ["dark", "bright"]
    assert not widget2.panel.features.isEnabled()
    widget2.drop_model()
    assert widget2.panel.features.isEnabled()


def test_live_mode_updates_only_if_labels_changed(qt, make_widget):
    viewer, widget = make_widget(halves(50, 64))
    widget.new_labels()
    widget.panel.live.setChecked(True)
    settle(qt, widget)
    assert "need at least 2 labelled classes, got 0 (none)" in widget.panel.status.text()
    draw(widget.labels)
    settle(qt, widget)
    classes = viewer.layers["page classes"]
    classes_before = classes.data.copy()
    assert set(np.unique(classes_before)) == {1, 2}
    requests = record_requests(widget)
    widget.labels.refresh()
    widget.labels.opacity = 0.3
    settle(qt, widget)
    assert not requests
    widget.labels.paint((30, 32), 3)
    settle(qt, widget)
    assert len(requests) == 1
    assert widget.panel.names == ["class 1", "class 2", "class 3"]
    assert (classes.data == 3).any()
    widget.labels.undo()
    widget.labels.data = np.where(widget.labels.data == 3, 0, widget.labels.data)
    settle(qt, widget)
    assert len(requests) == 2
    np.testing.assert_array_equal(classes.data, classes_before)
    widget.panel.live.setChecked(False)
    widget.labels.paint((30, 32), 3)
    settle(qt, widget)
    assert len(requests) == 2


def test_requests_during_computation_are_merged(qt, make_widget):
    _, widget = make_widget(halves(50, 64))
    widget.new_labels()
    draw(widget.labels)
    requests = record_requests(widget)
    for _ in range(4):
        widget.segment()
    settle(qt, widget)
    while widget.busy:
        settle(qt, widget)
    assert len(requests) == 2


def test_stacks_and_colour_images_are_segmented(qt, make_widget):
    data = halves(2, 3, 40, 48)
    viewer, widget = make_widget(data, scale=(1, 2, 1, 1))
    assert not widget.panel.all_pages_button.isHidden()
    viewer.dims.set_current_step((0, 1), (1, 2))
    assert qt.layers.page_at(widget.image, viewer.dims.point) == 5
    widget.new_labels()
    draw(widget.labels, (1, 2))
    widget.segment()
    settle(qt, widget)
    classes = viewer.layers["page classes"].data
    assert classes.shape == data.shape
    assert (classes[1, 2] > 0).all()
    assert (classes.reshape(6, 40, 48)[:5] == 0).all()
    assert np.isnan(viewer.layers["page uncertainty"].data[0]).all()
    widget.panel.live.setChecked(True)
    viewer.dims.set_current_step((0, 1), (0, 0))
    settle(qt, widget)
    assert (classes[0, 0] > 0).all()
    assert (classes[0, 1] == 0).all()
    widget.panel.live.setChecked(False)
    widget.segment(every=True)
    settle(qt, widget)
    assert (classes > 0).all()

    colour = np.stack([halves(40, 48)] * 4, -1)
    colour[..., 1] //= 2
    viewer, widget = make_widget(colour, rgb=True)
    assert widget.panel.all_pages_button.isHidden()
    image = qt.layers.image_of(widget.image)
    assert image.pages.shape == (1, 40, 48, 3)
    widget.new_labels()
    draw(widget.labels)
    widget.segment()
    settle(qt, widget)
    assert viewer.layers["page classes"].data.shape == (40, 48)


def test_trust_shows_verdict_and_disagreement(qt, make_widget):
    viewer, widget = make_widget(halves(64, 64))
    widget.new_labels()
    draw(widget.labels)
    widget.segment(trust=True)
    settle(qt, widget)
    assert "rotated" in widget.panel.verdict.text()
    disagreement = viewer.layers["page disagreement"].data
    assert disagreement.shape == (64, 64)
    assert np.nanmax(disagreement) <= 0.5


def test_errors_are_shown_in_the_panel(qt, make_widget, tmp_path):
    viewer = qt.Viewer()
    widget = qt.Widget(viewer)
    widget.new_labels()
    assert widget.panel.status.text() == "open an image first."
    widget.segment()
    assert widget.panel.status.text() == "open an image first."
    viewer, widget = make_widget(halves(40, 48))
    widget.segment()
    assert widget.panel.status.text().startswith("select a labels layer, or press New")
    viewer.add_labels(np.ones((9, 9), int), name="small")
    widget.panel.labels.setCurrentText("small")
    widget.segment()
    assert "'small' is 9 x 9, but the image 'page' is 40 x 48" in widget.panel.status.text()
    widget.save(tmp_path / "m.vispe")
    assert widget.panel.status.text().startswith("there is no model yet")
    widget.load(tmp_path / "nothing.vispe")
    assert "nothing.vispe does not exist" in widget.panel.status.text()
    assert "color" in widget.panel.status.styleSheet()
    viewer.layers.remove("small")
    viewer.layers.remove("page")
    assert widget.image is None
    assert widget.labels is None


def test_samples_open_and_can_be_segmented(qt):
    for make, count in ((qt.samples.cell, 2), (qt.samples.tissue, 3), (qt.samples.textures, 0)):
        viewer = qt.Viewer()
        for data, options, kind in make():
            getattr(viewer, f"add_{kind}")(data, **options)
        widget = qt.Widget(viewer)
        if count:
            assert len(widget.panel.names) == count
            assert set(np.unique(widget.labels.data)) == set(range(count + 1))
        else:
            assert viewer.layers[0].data.shape == (3, 512, 512)


@pytest.mark.parametrize("shape", [(80, 100), (3, 80, 100)])
def test_suggestions_are_rings_that_replace_earlier_ones(qt, make_widget, shape):
    viewer, widget = make_widget(halves(*shape))
    widget.new_labels()
    draw(widget.labels, (0,) * (len(shape) - 2))
    brush = widget.labels
    viewer.layers.selection.active = brush
    for _ in range(2):
        widget.panel.suggest_button.click()
        settle(qt, widget)
        (rings,) = [layer for layer in viewer.layers if layer.name == "page suggested labels"]
    assert rings.data.shape == (len(rings.features), len(shape))
    assert rings.features["number"].tolist() == list(range(1, len(rings.data) + 1))
    live = Live(
        micrograph(viewer.layers["page"].data, "ZYX"[-len(shape) :]),
        page=0 if len(shape) == 2 else int(rings.data[0, 0]),
        features=FeatureConfig(),
    )
    live.update(brush.data)
    expected = suggest(live)
    assert rings.data[:, -2:].tolist() == [[position.y, position.x] for position in expected]
    assert rings.features["reason"].tolist() == [position.reason for position in expected]
    assert widget.panel.status.text().startswith(f"1: {expected[0].reason}")
    assert viewer.layers.selection.active is brush
    assert "page suggested labels" not in [
        widget.panel.labels.itemText(i) for i in range(widget.panel.labels.count())
    ]
