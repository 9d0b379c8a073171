"""From texts to a model that segments: nothing is trained."""

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
    """Return what segments the images of a run by texts, and say what its user should know."""
    features = TextFeatures(config, prompts, seed=seed, device=device)
    config = features.config
    if config.weights == "random":
        run.note(f"{config.model} has random weights: the classes mean nothing.")
    run.note("texts are unreliable on micrographs: look at the overlays before using any number.")
    notes = {
        "prompts": dict(zip(prompts.names, map(list, prompts.phrases), strict=True)),
        "templates": list(prompts.templates),
        "readout": asdict(parse_readout(config.readout)),
    }
    found = {"classifier": features.classifier, "names": prompts.names, "colors": None, "channels": None}
    return features, Model.of(features, run.reading, **found, seed=seed, notes=notes)
