"""Draw the figure of the plugin in docs/how-to/micrographs/napari.md, without a display.

    python eval/segment/napari_figure.py [--out docs/figures/napari.png]

Qt's offscreen platform has no OpenGL, so napari's canvas stays black there. The window is drawn by Qt, the canvas by
napari's own scene in an EGL context (Mesa's software renderer will do), and both are combined.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import checkout  # noqa: F401  (finds vispe)
import numpy as np
from PIL import Image

os.environ |= {"QT_QPA_PLATFORM": "offscreen", "EGL_PLATFORM": "surfaceless", "PYOPENGL_PLATFORM": "egl"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[2] / "docs" / "figures" / "napari.png"
    )
    parser.add_argument(
        "--window-size", type=int, nargs=2, default=(1180, 800), help="of the window, in pixels"
    )
    parser.add_argument("--features", default="vispe_micro and filters")
    parser.add_argument(
        "--without-trust", action="store_true", help="omit the invariance report, which takes longest"
    )
    args = parser.parse_args()
    from vispy.app import Application, Canvas
    from vispy.gloo import gl

    context = Canvas(app=Application("egl"), show=False, size=(64, 64))
    context.set_current()
    extensions = gl.glGetParameter(gl.GL_EXTENSIONS)

    import napari
    from napari._vispy.utils import gl as needs
    from qtpy.QtWidgets import QApplication

    from vispe.segment.napari import samples
    from vispe.segment.napari.widget import SegmentWidget

    needs.get_gl_extensions = lambda: extensions
    viewer = napari.Viewer(show=False)
    for data, options, kind in samples.tissue():
        getattr(viewer, f"add_{kind}")(data, **options)
    widget = SegmentWidget(viewer)
    widget.panel.features.setCurrentText(args.features)

    def wait() -> None:
        QApplication.processEvents()
        while widget.busy:
            QApplication.processEvents()
            time.sleep(0.01)
        QApplication.processEvents()

    widget.segment()
    wait()
    if not args.without_trust:
        widget.segment(trust=True)
        wait()
        viewer.layers["tissue disagreement"].visible = False
    widget.segment()  # with features in memory
    wait()
    widget.panel.live.setChecked(True)
    window = viewer.window._qt_window
    viewer.window.add_dock_widget(widget, name="Segment with scribbles", area="right")
    window.resize(*args.window_size)
    image = pixels(window.grab().toImage())
    canvas = viewer.window._qt_viewer.canvas
    native = canvas.native
    place = native.mapTo(window, native.rect().topLeft())
    size = native.width(), native.height()
    native._physical_size = size  # which OpenGL would have told it
    canvas._scene_canvas.events.resize(size=size, physical_size=size)
    viewer.reset_view()
    context.set_current()
    drawn = canvas._scene_canvas.render(size=size, alpha=False)
    h, w = drawn.shape[:2]
    image[place.y() : place.y() + h, place.x() : place.x() + w] = drawn[..., :3]
    Image.fromarray(image).quantize(192, dither=Image.Dither.NONE).save(args.out, optimize=True)
    print(args.out, image.shape, f"{args.out.stat().st_size / 1000:.0f} kB", drawn.std())


def pixels(image: object) -> np.ndarray:
    """Return a QImage as (h, w, 3) uint8."""
    image = image.convertToFormat(image.Format.Format_RGB888)
    flat = np.frombuffer(image.constBits().asstring(image.sizeInBytes()), np.uint8)
    rows = flat.reshape(image.height(), image.bytesPerLine())[:, : 3 * image.width()]
    return rows.reshape(image.height(), image.width(), 3).copy()


if __name__ == "__main__":
    main()
