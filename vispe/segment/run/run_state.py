"""Base class of runs on files in memory and on stores: settings, notes, failures and the report."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vispe.errors import InputError, OptionError
from vispe.segment.features.pixel_features import FeatureConfig, Features
from vispe.segment.model.model_file import Model
from vispe.segment.run.inputs import as_list
from vispe.segment.run.request import Request
from vispe.segment.run.run_report import Report, run_settings
from vispe.segment.text.config import TextConfig

MODEL_NAME = "model.vispe"


class Run:
    """One run, from checked inputs to results.

    Args:
        request: the validated arguments.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.out = request, Path(request.out)
        self.reading, self.post = request.reading, request.post
        self.force, self.watch = request.force, request.watch
        self.report = Report({})
        self.writes_model = request.command == "segment"

    def note(self, text: str) -> None:
        """Record and announce a note about the run, once."""
        if text not in self.report.notes:
            self.report.notes.append(text)
            self.watch.note(text)

    def skip(self, path: str | Path, error: BaseException) -> None:
        """Record and announce an image that cannot be used."""
        reason = " ".join(str(error).split())
        self.report.failures.append({"image": str(path), "reason": reason})
        self.watch.failed(str(path), reason)

    def describe(self, features: Features, model: Model, **more: Any) -> None:
        """Write the settings of the run into the report."""
        file = {"model_file": str(self.request.model)} if self.request.model is not None else {}
        described_run = run_settings(features, model, self.post)
        if self.request.command == "apply" and model.domain is None and model.classifier.kind != "text":
            self.note(
                f"{self.request.model} contains no summary of its training images (older vispe version, or images too "
                "small), so out-of-distribution images are not detected. Train it again to enable the check."
            )
        reading = self.request.reading
        reading_record = {
            "orientation": reading.orientation,
            "crop": reading.crop,
            "mask": [str(path) for path in as_list(reading.mask)],
        }
        self.report.run = {
            "command": self.request.command,
            **file,
            **described_run,
            "reading": reading_record,
            **more,
        }


def requested_features(model: Model, request: Request) -> FeatureConfig | TextConfig:
    """Return the feature configuration of a model, with the requested weights and tile.

    Raises:
        OptionError: weights for a model that has none.
    """
    if request.weights is not None and model.features.kind == "filters":
        raise OptionError(f"weights={request.weights!r} has no effect: {request.model} uses filters only.")
    overrides = {"weights": request.weights, "tile": request.tile}
    return replace(model.features, **{name: value for name, value in overrides.items() if value is not None})


def common_channel_count(channels: dict[Path, int], what: str) -> int:
    """Return the common number of channels of several images.

    Args:
        channels: number of channels of each image.
        what: name of the images, for the message.

    Raises:
        InputError: the numbers differ.
    """
    if len(set(channels.values())) > 1:
        counts_by_image = ", ".join(f"{path.name}: {count}" for path, count in channels.items())
        raise InputError(
            f"{what} differ in their number of channels ({counts_by_image}). Select channels with channel."
        )
    return next(iter(channels.values()))


def check_channels(path: Path, channels: int, model: Model) -> None:
    """Raise InputError if an image and the training images of a model differ in their number of channels."""
    if model.channels not in (None, channels):
        raise InputError(
            f"{path} has {channels} channel(s), but the model was trained with {model.channels}. Select channels with "
            "channel."
        )
