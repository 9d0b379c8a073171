"""Runner of `vispe probe`: final features, every block, and debiasing methods, for one source of images."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from torch import Tensor

from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, UnsupportedHost
from vispe.evaluate.evaluated import EvaluatedModel
from vispe.evaluate.features.position_across_images import position_across_images
from vispe.evaluate.measure.audited_model import as_audited_model
from vispe.evaluate.measure.probe_images import load_images
from vispe.evaluate.probe.baselines import probe_baselines
from vispe.evaluate.probe.figures.html_report import SourceProbe
from vispe.evaluate.probe.layer_probe import probe_layers
from vispe.evaluate.probe.positional import positional_probe
from vispe.evaluate.probe.regression_data import Regressor
from vispe.evaluate.probe.splits import POSITIONS
from vispe.evaluate.probe.targets import TARGETS
from vispe.utils.options import NonNegativeFloat, NonNegativeInt, Options, PositiveInt, Seed, checked

_CHOSEN_ON = 4  # noise images for channel selection and the fit of RASA if there is only a single image
_ACROSS = 4, 16  # smallest and largest number of images for probes across images
_TOKENS = 2048
_MIXED = 8  # number of noise images, and of textures, for the fit of RASA on images of several kinds


@dataclass(frozen=True)
class Question(Options):
    """Options of a probe, for all sources of images.

    Attributes:
        target: the headline.
        step: a fraction 1 / step² of the patches is used for training.
        masks: number of training masks per image.
        regressor: `ridge`, or `linear` for min-norm least squares.
        alpha: ridge penalty.
        layers: whether to probe every block.
        baselines: whether to probe debiasing methods.
        blank: channels to set to 0; the 4 with the highest R² by default.
        shifts: number along each side, for averages.
        seed: seed of all random numbers.

    Raises:
        OptionError: options of debiasing methods without `baselines`, or `alpha` without ridge regression.
    """

    target: str = "lr+ud"
    step: PositiveInt = 6
    masks: PositiveInt = 6
    regressor: Regressor = "ridge"
    alpha: NonNegativeFloat = 1.0
    layers: bool = True
    baselines: bool = False
    blank: Sequence[NonNegativeInt] | None = None
    shifts: PositiveInt = 4
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.regressor == "linear" and self.alpha != Question.alpha:
            raise OptionError(
                f"Question: alpha={self.alpha:g} has no effect on regressor=linear. Omit one of them."
            )
        if not self.baselines and (self.blank is not None or self.shifts != 4):
            raise OptionError(
                f"Question: blank and shifts need baselines=True, got blank={self.blank} and shifts={self.shifts}. Set "
                "baselines."
            )


@checked
def requested_sources(
    paths: Sequence[str | Path], noise: NonNegativeInt, textures: NonNegativeInt
) -> dict[str, Sequence[str | Path] | int]:
    """Return the sources of images: files, number of noise images, number of textures; empty ones are omitted.

    Raises:
        OptionError: there are no images, or a number is negative.
    """
    counts = {"images": paths, "noise": noise, "textures": textures}
    if not any(counts.values()):
        raise OptionError(
            "probe: no images, got empty paths, noise=0 and textures=0. Pass paths, noise or textures."
        )
    return {source: content for source, content in counts.items() if content}


class _Reiterable:
    """Iterable that creates a new iterator of images every time."""

    def __init__(self, make: Callable[[], Iterable[Tensor]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.make())


def probe_source(
    subject: EvaluatedModel,
    source: str,
    what: Sequence[str | Path] | int,
    question: Question,
    shown: Callable[[Iterable[Tensor], str], Iterable[Tensor]] = lambda images, words: images,
) -> SourceProbe:
    """Probe a subject on one source of images; remarks on files are issued as warnings.

    Args:
        subject: a model, a function of images, or a segmenter, whose class probabilities are the features.
        source: 'images', 'noise' or 'textures'.
        what: image files, or the number of images.
        question: options of the probe.
        shown: wraps an iterable of images with a description, for a progress bar.

    Raises:
        UnsupportedHost: `question.layers` is set for a model without accessible blocks.
    """
    audited, seed = as_audited_model(subject), question.seed
    if question.layers and not isinstance(audited.f, VisionModel):
        raise UnsupportedHost(
            f"{audited.title} has only final features, got layers=True. Pass `layers=False`."
        )
    paths, generated = (what, {}) if source == "images" else ((), {source: what})
    images, _, notes = load_images(subject, paths, **generated, seed=seed)
    fit = {"step": question.step, "masks_per_image": question.masks}
    fit |= {"regressor": question.regressor, "alpha": question.alpha, "generator": seed}
    shown_images = shown(images, f"probing {source}")
    probe = positional_probe(audited.f, shown_images, targets=(question.target, *TARGETS), **fit)
    layers = baselines = None
    fit |= {"targets": (question.target, *POSITIONS)}
    if question.layers:
        layers = probe_layers(audited.f, shown(images, f"probing {source} after every block"), **fit)
    across = None
    if len(images) >= _ACROSS[0]:
        selection = islice(shown(images, f"probing {source} across images"), _ACROSS[1])
        maps = [audited.maps(image[None])[0] for image in selection]
        across = position_across_images(maps, tokens=_TOKENS, seed=seed)
    if question.baselines:
        blank = 4 if question.blank is None else question.blank
        # another seed than that of the probed noise
        single = probe.n_images == 1
        others = load_images(subject, (), noise=_CHOSEN_ON, seed=seed + 1)[0] if single else None
        mixed = load_images(subject, (), noise=_MIXED, textures=_MIXED, seed=seed + 1)[0]
        black = subject.tensor(np.zeros((1, 1, 1), np.float32))
        fit |= {
            "blank": blank,
            "choose_on": others,
            "mixed": mixed,
            "black": black,
            "patch_size": audited.patch_size,
        }
        each = _Reiterable(lambda: shown(images, f"remedies on {source}"))
        baselines = probe_baselines(audited.f, each, shifts=question.shifts, **fit)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return SourceProbe(probe, layers, baselines, across)
