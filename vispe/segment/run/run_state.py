"""What runs on files in memory and runs on stores have in common: settings, notes, failures and the report."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vispe.errors import InputError, OptionError
from vispe.segment.features.pixel_features import FeatureConfig, Features
from vispe.segment.model.model_file import Model
from vispe.segment.run.inputs import listed
from vispe.segment.run.request import Request
from vispe.segment.run.run_report import Report, described
from vispe.segment.text.config import TextConfig

MODEL_NAME = "model.vispe"


class Run:
    """One run, from checked inputs to results.

    Args:
        asked: what it is asked to do.
    """

    def __init__(self, asked: Request) -> None:
        self.asked, self.out = asked, Path(asked.out)
        self.reading, self.post = asked.reading, asked.post
        self.force, self.watch = asked.force, asked.watch
        self.report = Report({})
        self.writes_model = asked.command == "segment"

    def note(self, text: str) -> None:
        """Keep and announce something about the whole run, once."""
        if text not in self.report.notes:
            self.report.notes.append(text)
            self.watch.note(text)

    def left_out(self, path: str | Path, error: BaseException) -> None:
        """Record and announce an image that cannot be used."""
        reason = " ".join(str(error).split())
        self.report.failures.append({"image": str(path), "reason": reason})
        self.watch.failed(str(path), reason)

    def describe(self, features: Features, model: Model, **more: Any) -> None:
        """Say in the report what the run works with."""
        file = {"model_file": str(self.asked.model)} if self.asked.model is not None else {}
        described_run = described(features, model, self.post)
        if self.asked.command == "apply" and model.domain is None and model.classifier.kind != "text":
            self.note(
                f"{self.asked.model} holds no summary of its training images (an earlier vispe made it, or they were "
                "too small), so images that differ from them are not found; train it again to have them found."
            )
        how = self.asked.reading
        read = {
            "orientation": how.orientation,
            "crop": how.crop,
            "mask": [str(path) for path in listed(how.mask)],
        }
        self.report.run = {"command": self.asked.command, **file, **described_run, "reading": read, **more}


def refitted(model: Model, asked: Request) -> FeatureConfig | TextConfig:
    """Return the features of a model, with the weights and the tile that were asked for.

    Raises:
        OptionError: weights for a model that has none.
    """
    if asked.weights is not None and model.features.kind == "filters":
        raise OptionError(f"weights={asked.weights!r} has no effect: {asked.model} uses filters only.")
    given = {"weights": asked.weights, "tile": asked.tile}
    return replace(model.features, **{name: value for name, value in given.items() if value is not None})


def one_channel_count(channels: dict[Path, int], what: str) -> int:
    """Return how many channels images have.

    Args:
        channels: of each image.
        what: the images, for the message.

    Raises:
        InputError: images that differ.
    """
    if len(set(channels.values())) > 1:
        listed = ", ".join(f"{path.name}: {count}" for path, count in channels.items())
        raise InputError(f"{what} differ in their channels ({listed}); choose some with --channel.")
    return next(iter(channels.values()))


def check_channels(path: Path, channels: int, model: Model) -> None:
    """Raise InputError for an image with other channels than those that a model was trained with."""
    if model.channels not in (None, channels):
        raise InputError(
            f"{path} has {channels} channel(s), but the model was trained with {model.channels}; choose channels with "
            "--channel."
        )
