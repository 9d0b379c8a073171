"""View of the widget, independent of layers and segmentation."""

from __future__ import annotations

from collections.abc import Sequence

from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import (
    QCheckBox,
    QComboBox,
    QFormLayout,
    QGridLayout,
    QGroupBox,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QProgressBar,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from vispe.segment.classify.pixel_classifier import KINDS
from vispe.segment.napari.requests import FEATURES
from vispe.segment.overlays import PALETTE, Color

_FEWEST = 2
_BAD = "#D55E00"


class Panel(QWidget):
    """Controls and messages, from top to bottom.

    Args:
        parent: widget that it fills.

    Attributes:
        picked: signal, the number of a class was clicked.
        renamed: signal, a class was renamed.
    """

    picked = Signal(int)
    renamed = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.image, self.labels = QComboBox(), QComboBox()
        self.new = _button("New", "Add an empty labels layer for the image, and activate the brush.")
        self.features, self.classifier = QComboBox(), QComboBox()
        self.features.addItems(list(FEATURES))
        self.classifier.addItems(list(KINDS))
        self.classifier.setToolTip(
            "ensemble, the default of vispe segment, shows the result of logistic first, while you paint; its own "
            "follows after seconds. forest and boosting take seconds for each change."
        )
        self.add = _button("+ class", "Add a class.")
        self.live = QCheckBox("Live")
        self.live.setToolTip("Segment whenever the labels, the page or a choice changes.")
        self.segment_button = _button("Segment", "Segment the current page.")
        self.all_pages_button = _button("All pages", "Segment every page of the stack with the same model.")
        self.suggest_button = _button(
            "Suggest labels", "Mark up to five locations where a scribble would help most."
        )
        self.load = _button("Load model ...", "A model of vispe segment, or of this plugin.")
        self.save = _button("Save model ...", "For vispe apply, or for a later session.")
        self.unload_button = _button("Unload model", "Return to the selected features and classifier.")
        self.invariance_button = _button(
            "Test invariance", "Segment the page rotated, mirrored and shifted, and compare the results."
        )
        self.verdict, self.status, self.notes, self.loaded = (_text() for _ in range(4))
        self.bar = QProgressBar()
        self.bar.setTextVisible(False)
        self.bar.setFixedHeight(6)
        self._rows: list[tuple[QPushButton, QLineEdit]] = []
        self._build(parent)
        self.show_names(())
        self.show_model(None)
        self.set_busy(False)

    @property
    def names(self) -> list[str]:
        """Class names; class k for empty lines."""
        return [line.text().strip() or f"class {k + 1}" for k, (_, line) in enumerate(self._rows)]

    def list_layers(self, images: Sequence[str], labels: Sequence[str]) -> None:
        """List layers; the current selection is preserved if it still exists."""
        for box, names in ((self.image, images), (self.labels, labels)):
            current = box.currentText()
            box.blockSignals(True)
            box.clear()
            box.addItems(list(names))
            if current in names:
                box.setCurrentText(current)
            box.blockSignals(False)

    def show_names(self, names: Sequence[str], count: int = 0) -> None:
        """Show a line for each name, and empty ones up to `count`, at least two."""
        n_lines = max(len(names), count, _FEWEST)
        while len(self._rows) > n_lines:
            for part in self._rows.pop():
                part.deleteLater()
        while len(self._rows) < n_lines:
            self._add_row()
        for k, (_, line) in enumerate(self._rows):
            line.setText(names[k] if k < len(names) else "")
        self.add.setEnabled(n_lines < len(PALETTE))

    def show_colors(self, colors: Sequence[Color] | None) -> None:
        """Show the colours of the classes next to the names; None for the default palette."""
        for k, (swatch, _) in enumerate(self._rows):
            color = colors[k] if colors is not None and k < len(colors) else _palette(k)
            swatch.setStyleSheet(_swatch(color))

    def show_model(self, name: str | None) -> None:
        """Show the loaded model file, which disables the choice of features and classifier."""
        self.loaded.setText(f"model: {name}" if name else "")
        self.loaded.setVisible(name is not None)
        self.unload_button.setVisible(name is not None)
        for box in (self.features, self.classifier):
            box.setEnabled(name is None)

    def choose(self, number: int) -> None:
        """Emit the signal of a clicked class."""
        self.picked.emit(number)

    def set_busy(self, busy: bool) -> None:
        """Enable or disable the controls that start work; labels can be painted at any time."""
        self.bar.setRange(0, 100)
        self.progress(0)
        self.invariance_button.setEnabled(not busy)
        self.suggest_button.setEnabled(not busy)
        self.all_pages_button.setEnabled(not busy)

    def progress(self, fraction: float) -> None:
        """Show the fraction of finished work, 0 to 1."""
        self.bar.setValue(round(100 * min(fraction, 1)))

    def show_message(self, text: str, error: bool = False, notes: Sequence[str] = ()) -> None:
        """Show a message, as an error or not, and notes below it."""
        self.status.setText(text)
        self.status.setStyleSheet(f"color: {_BAD}" if error else "")
        self.notes.setText("\n".join(notes))
        self.notes.setVisible(bool(notes))

    def _add_row(self) -> None:
        number = len(self._rows) + 1
        swatch, line = QPushButton(str(number)), QLineEdit()
        swatch.setFixedSize(30, 24)
        swatch.setStyleSheet(_swatch(_palette(number - 1)))
        swatch.setToolTip(f"Paint class {number}.")
        swatch.clicked.connect(lambda: self.picked.emit(number))
        line.setPlaceholderText(f"class {number}")
        line.editingFinished.connect(self.renamed)
        self._rows.append((swatch, line))
        self._grid.addWidget(swatch, number, 0)
        self._grid.addWidget(line, number, 1)

    def _build(self, parent: QWidget) -> None:
        outer = QVBoxLayout(parent)
        outer.addWidget(self)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        form = QFormLayout()
        form.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.AllNonFixedFieldsGrow)
        form.addRow("image", self.image)
        form.addRow("labels", _row(self.labels, self.new, wide=0))
        column.addLayout(form)
        classes = QGroupBox("Classes: click a number, then paint")
        self._grid = QGridLayout(classes)
        self._grid.setColumnStretch(1, 1)
        column.addWidget(classes)
        column.addWidget(_row(self.add))
        settings = QFormLayout()
        settings.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.AllNonFixedFieldsGrow)
        settings.addRow("features", self.features)
        settings.addRow("classifier", self.classifier)
        column.addLayout(settings)
        column.addWidget(self.loaded)
        column.addWidget(_row(self.segment_button, self.live, self.all_pages_button, wide=0))
        column.addWidget(self.suggest_button)
        column.addWidget(self.bar)
        column.addWidget(self.status)
        column.addWidget(self.notes)
        column.addWidget(_row(self.load, self.save))
        column.addWidget(self.unload_button)
        column.addWidget(self.invariance_button)
        column.addWidget(self.verdict)
        column.addStretch(1)
        self.add.clicked.connect(lambda: self.show_names(self._texts(), len(self._rows) + 1))

    def _texts(self) -> list[str]:
        return [line.text() for _, line in self._rows]


def _button(text: str, tip: str) -> QPushButton:
    button = QPushButton(text)
    button.setToolTip(tip)
    return button


def _text() -> QLabel:
    """Return a label for selectable text."""
    label = QLabel()
    label.setWordWrap(True)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label


def _row(*parts: QWidget, wide: int | None = None) -> QWidget:
    """Arrange widgets in a row; the one with index `wide` is stretched."""
    row = QWidget()
    line = QHBoxLayout(row)
    line.setContentsMargins(0, 0, 0, 0)
    for k, part in enumerate(parts):
        line.addWidget(part, 1 if k == wide else 0)
    return row


def _palette(index: int) -> Color:
    return PALETTE[index % len(PALETTE)]


def _swatch(color: Color) -> str:
    """Return the style of a coloured button, with readable text."""
    dark = sum(c * w for c, w in zip(color, (0.299, 0.587, 0.114), strict=True)) < 140
    return f"background-color: rgb{tuple(color)}; color: {'white' if dark else 'black'}; font-weight: bold"
