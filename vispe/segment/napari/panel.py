"""What the widget looks like; it knows nothing of layers or segmentation."""

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
from vispe.segment.napari.session import FEATURES
from vispe.segment.overlays import PALETTE, Color

_FEWEST = 2
_BAD = "#D55E00"


class Panel(QWidget):
    """Choices, buttons and messages, from top to bottom.

    Args:
        parent: widget that it fills.

    Attributes:
        picked: signal, the number of a class was clicked.
        renamed: signal, a class has another name.
    """

    picked = Signal(int)
    renamed = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.image, self.labels = QComboBox(), QComboBox()
        self.new = _button("New", "Add an empty labels layer for the image, and take the brush.")
        self.features, self.classifier = QComboBox(), QComboBox()
        self.features.addItems(list(FEATURES))
        self.classifier.addItems(list(KINDS))
        self.classifier.setToolTip("logistic follows the brush; forest and boosting take seconds.")
        self.add = _button("+ class", "One class more.")
        self.live = QCheckBox("Live")
        self.live.setToolTip("Segment whenever the labels, the page or a choice changes.")
        self.go = _button("Segment", "Segment the page that is shown.")
        self.every = _button("All pages", "Segment every page of the stack with the same model.")
        self.hint = _button("Label here next", "Mark up to five places where a stroke would teach most.")
        self.load = _button("Load model ...", "A model of vispe segment, or of this plugin.")
        self.save = _button("Save model ...", "For vispe apply, or for another day.")
        self.drop = _button("Forget model", "Go back to the choices of features and classifier.")
        self.turn = _button(
            "Does turning matter?", "Segment the page turned, mirrored and shifted, and compare."
        )
        self.verdict, self.status, self.notes, self.loaded = (_text() for _ in range(4))
        self.bar = QProgressBar()
        self.bar.setTextVisible(False)
        self.bar.setFixedHeight(6)
        self._rows: list[tuple[QPushButton, QLineEdit]] = []
        self._build(parent)
        self.show_names(())
        self.show_model(None)
        self.work(False)

    @property
    def names(self) -> list[str]:
        """The class names; class k where a line is empty."""
        return [line.text().strip() or f"class {k + 1}" for k, (_, line) in enumerate(self._rows)]

    def offer(self, images: Sequence[str], labels: Sequence[str]) -> None:
        """List layers; what is chosen stays chosen while it exists."""
        for box, names in ((self.image, images), (self.labels, labels)):
            before = box.currentText()
            box.blockSignals(True)
            box.clear()
            box.addItems(list(names))
            if before in names:
                box.setCurrentText(before)
            box.blockSignals(False)

    def show_names(self, names: Sequence[str], count: int = 0) -> None:
        """Show a line for each name, and empty ones up to `count`, at least two."""
        wanted = max(len(names), count, _FEWEST)
        while len(self._rows) > wanted:
            for part in self._rows.pop():
                part.deleteLater()
        while len(self._rows) < wanted:
            self._add_row()
        for k, (_, line) in enumerate(self._rows):
            line.setText(names[k] if k < len(names) else "")
        self.add.setEnabled(wanted < len(PALETTE))

    def show_colors(self, colors: Sequence[Color] | None) -> None:
        """Show other colours than vispe's beside the names."""
        for k, (swatch, _) in enumerate(self._rows):
            color = colors[k] if colors is not None and k < len(colors) else _palette(k)
            swatch.setStyleSheet(_swatch(color))

    def show_model(self, name: str | None) -> None:
        """Say which model file is in use; its features and classifier are not to be chosen."""
        self.loaded.setText(f"model: {name}" if name else "")
        self.loaded.setVisible(name is not None)
        self.drop.setVisible(name is not None)
        for box in (self.features, self.classifier):
            box.setEnabled(name is None)

    def choose(self, number: int) -> None:
        """Do as if the swatch of a class had been clicked."""
        self.picked.emit(number)

    def work(self, busy: bool) -> None:
        """Show that work is going on, or not any more; labels can be painted all the time."""
        self.bar.setRange(0, 100)
        self.progress(0)
        self.turn.setEnabled(not busy)
        self.hint.setEnabled(not busy)
        self.every.setEnabled(not busy)

    def progress(self, share: float) -> None:
        """Show how much of the work is done, 0 to 1."""
        self.bar.setValue(round(100 * min(share, 1)))

    def say(self, text: str, error: bool = False, notes: Sequence[str] = ()) -> None:
        """Show one sentence, as an error or not, and smaller ones below."""
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
        """Put everything in its place."""
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
        how = QFormLayout()
        how.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.AllNonFixedFieldsGrow)
        how.addRow("features", self.features)
        how.addRow("classifier", self.classifier)
        column.addLayout(how)
        column.addWidget(self.loaded)
        column.addWidget(_row(self.go, self.live, self.every, wide=0))
        column.addWidget(self.hint)
        column.addWidget(self.bar)
        column.addWidget(self.status)
        column.addWidget(self.notes)
        column.addWidget(_row(self.load, self.save))
        column.addWidget(self.drop)
        column.addWidget(self.turn)
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
    """Return a label for sentences that can be selected and copied."""
    label = QLabel()
    label.setWordWrap(True)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label


def _row(*parts: QWidget, wide: int | None = None) -> QWidget:
    """Put widgets side by side; the one numbered `wide` takes the room that is left."""
    row = QWidget()
    line = QHBoxLayout(row)
    line.setContentsMargins(0, 0, 0, 0)
    for k, part in enumerate(parts):
        line.addWidget(part, 1 if k == wide else 0)
    return row


def _palette(index: int) -> Color:
    return PALETTE[index % len(PALETTE)]


def _swatch(color: Color) -> str:
    """Colour a button, with ink that can be read on it."""
    dark = sum(c * w for c, w in zip(color, (0.299, 0.587, 0.114), strict=True)) < 140
    return f"background-color: rgb{tuple(color)}; color: {'white' if dark else 'black'}; font-weight: bold"
