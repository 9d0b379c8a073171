"""Keys of records: structured fields, printed in tables and files as a transform and a part."""

from dataclasses import dataclass

D4_MEAN, D4_WORST = "D4", "D4 worst"
ANGLE, ALL_ANGLES, ALL_POSES = "angle", "all angles", "all poses"
ROLL, CROP_SHIFT = "roll", "crop shift"
WHOLE, PARTS = "whole patches", "parts of a patch"
RANDOM_PHASES, ALL_PHASES = "roll, random phases", "roll, all phases"
IDENTICAL, SHUFFLED, SHUFFLED_POSITIONS = "identity", "shuffled", "shuffled positions"
UNMOVED, FOUR_CORNERS = "none", "four corners"
"""Transforms of the image, in addition to the names of poses."""

FULL, POSITION_CODE, RAW, RANDOM = "full", "position code", "raw intensity", "random weights"
FITTED_ONCE, REFITTED = "clusters fitted once", "clusters refitted"
SPREAD = "spread everywhere"
"""Parts of a model or controls, in addition to the names of classes."""

OVER_POSES = ("accuracy_mean", "accuracy_worst", "accuracy_spread", "accuracy_std")
"""Statistics of accuracy over angles."""

EVERY_POSE = "trained on all poses"
"""Training set of the segmenter."""


@dataclass(frozen=True)
class Key:
    """Key of a record.

    Attributes:
        question: transform of the image: the name of a pose, `ANGLE`, `ROLL`, `CROP_SHIFT` ...
        quantity: metric.
        part: `FULL`, `POSITION_CODE`, or the name of a class or of a control.
        amount: degrees of an angle, or pixels of a shift (down, right).
        layer: index of the block whose features were measured.
        training: `EVERY_POSE`, or '' for a segmenter that was passed in or trained on the original pose.

    >>> Key(ANGLE, "error", amount=(15.0,)).transform, Key(ROLL, "error", amount=(0, 8)).transform
    ('15°', 'roll (0, 8) px')
    >>> Key(D4_MEAN, "error", POSITION_CODE, layer=3).name
    'layer 3, position code'
    """

    question: str
    quantity: str
    part: str = FULL
    amount: tuple[float, ...] = ()
    layer: int | None = None
    training: str = ""

    @property
    def transform(self) -> str:
        """Transform as printed in tables."""
        if len(self.amount) == 2:
            return f"{self.question} ({self.amount[0]}, {self.amount[1]}) px"
        return f"{self.amount[0]:g}°" if self.amount else self.question

    @property
    def name(self) -> str:
        """Part as printed in tables."""
        layer = "" if self.layer is None else f"layer {self.layer}"
        part = "" if self.part == FULL else self.part
        return ", ".join(filter(None, (layer, part, self.training))) or FULL
