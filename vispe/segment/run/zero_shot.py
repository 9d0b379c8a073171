"""Zero-shot segmentation models from text prompts, without training."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from vispe.segment.model.model_file import Model
from vispe.segment.text.config import TextConfig
from vispe.segment.text.features import TextFeatures
from vispe.segment.text.prompts import Prompts
from vispe.segment.text.readouts import parse_readout

if TYPE_CHECKING:
    from vispe.segment.run.batch_run import Batch


def text_model(
    run: Batch, prompts: Prompts, config: TextConfig, seed: int, device: str
) -> tuple[TextFeatures, Model]:
    """Return features and model for the segmentation of a run's images by text, with notes for the user."""
    features = TextFeatures(config, prompts, seed=seed, device=device)
    config = features.config
    if config.weights == "random":
        run.note(f"{config.model} has random weights: the classes are meaningless.")
    run.note("text prompts are unreliable on micrographs: check the overlays before using any number.")
    notes = {
        "prompts": dict(zip(prompts.names, map(list, prompts.phrases), strict=True)),
        "templates": list(prompts.templates),
        "readout": asdict(parse_readout(config.readout)),
    }
    fields = {"classifier": features.classifier, "names": prompts.names, "colors": None, "channels": None}
    return features, Model.of(features, run.reading, **fields, seed=seed, notes=notes)
