"""One kind of pictures through all questions of the probe: final features, every block, remedies."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, UnsupportedHost
from vispe.evaluate.audit.audited_model import host_of
from vispe.evaluate.audit.probe_images import pictures_of
from vispe.evaluate.evaluated import Subject
from vispe.evaluate.probe.baselines import probe_baselines
from vispe.evaluate.probe.figures.html_report import SourceProbe
from vispe.evaluate.probe.fit import Regressor
from vispe.evaluate.probe.layer_probe import probe_layers
from vispe.evaluate.probe.positional import positional_probe
from vispe.evaluate.probe.splits import POSITIONS
from vispe.evaluate.probe.targets import TARGETS

_CHOSEN_ON = 4  # noise images, where a single picture leaves no other ones to choose channels on


@dataclass(frozen=True)
class Question:
    """What is asked of every kind of pictures.

    Attributes:
        target: the headline.
        step: one patch in step² is fitted.
        masks: choices of these patches for each image.
        regressor: `ridge`, or `linear` for least squares of least norm.
        alpha: penalty of ridge.
        layers: ask after every block too.
        baselines: ask after remedies too.
        blank: channels to set to 0; the 4 most telling ones by default.
        shifts: along each side, for averages.
        seed: of everything drawn.
    """

    target: str = "lr+ud"
    step: int = 6
    masks: int = 6
    regressor: Regressor = "ridge"
    alpha: float = 1.0
    layers: bool = True
    baselines: bool = False
    blank: Sequence[int] | None = None
    shifts: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.baselines and (self.blank is not None or self.shifts != 4):
            raise OptionError(
                "--blank and --shifts are about remedies, which were not asked for; add --baselines."
            )


def asked_sources(
    paths: Sequence[str | Path], noise: int, textures: int
) -> dict[str, Sequence[str | Path] | int]:
    """Return what is probed, by kind: the files of images, numbers of noise images and of textures.

    Raises:
        OptionError: there is nothing to look at.
    """
    counts = {"images": paths, "noise": max(noise, 0), "textures": max(textures, 0)}
    if not any(counts.values()):
        raise OptionError("probe needs something to look at: give images, or --noise N, or --textures N.")
    return {source: what for source, what in counts.items() if what}


class _Again:
    """Pictures that are shown anew whenever they are gone through."""

    def __init__(self, make: Callable[[], Iterable[Tensor]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.make())


def probe_source(
    subject: Subject,
    source: str,
    what: Sequence[str | Path] | int,
    question: Question,
    shown: Callable[[Iterable[Tensor], str], Iterable[Tensor]] = lambda pictures, words: pictures,
) -> SourceProbe:
    """Put all questions to a subject on one kind of pictures; what was noticed in files is given as warnings.

    Args:
        subject: a model, a function of images, or a segmenter, whose class probabilities are the features.
        source: 'images', 'noise' or 'textures'.
        what: the files of images, or the number of pictures.
        question: what is asked.
        shown: called with the pictures that are gone through and words, returns the pictures: for a progress bar.

    Raises:
        UnsupportedHost: blocks are asked of what has none.
    """
    host, seed = host_of(subject), question.seed
    if question.layers and not isinstance(host.f, VisionModel):
        raise UnsupportedHost(f"{host.title} shows no blocks, only final features; add --no-layers.")
    paths, made = (what, {}) if source == "images" else ((), {source: what})
    pictures, _, notes = pictures_of(subject, paths, **made, seed=seed)
    fit = {"step": question.step, "masks_per_image": question.masks}
    fit |= {"regressor": question.regressor, "alpha": question.alpha, "generator": seed}
    looked_at = shown(pictures, f"probing {source}")
    probe = positional_probe(host.f, looked_at, targets=(question.target, *TARGETS), **fit)
    layers = baselines = None
    fit |= {"targets": (question.target, *POSITIONS)}
    if question.layers:
        layers = probe_layers(host.f, shown(pictures, f"probing {source} after every block"), **fit)
    if question.baselines:
        blank = 4 if question.blank is None else question.blank
        single = probe.n_images == 1 and isinstance(blank, int)
        # other noise than what may be probed
        others = pictures_of(subject, (), noise=_CHOSEN_ON, seed=seed + 1)[0] if single else None
        black = subject.tensor(np.zeros((1, 1, 1), np.float32))
        fit |= {"blank": blank, "choose_on": others, "black": black, "patch": host.patch}
        each = _Again(lambda: shown(pictures, f"remedies on {source}"))
        baselines = probe_baselines(host.f, each, shifts=question.shifts, **fit)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return SourceProbe(probe, layers, baselines)
