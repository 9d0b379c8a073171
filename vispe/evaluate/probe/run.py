"""One kind of pictures through all questions of the probe: final features, every block, remedies."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from vispe.backbones.timm import noise_images, read_squares
from vispe.evaluate.probe.fit import Regressor
from vispe.evaluate.probe.layers import probe_layers
from vispe.evaluate.probe.pictures.page import SourceProbe
from vispe.evaluate.probe.positional import positional_probe
from vispe.evaluate.probe.ramps import TARGETS
from vispe.evaluate.probe.remedies import probe_baselines
from vispe.evaluate.probe.sources import texture_images
from vispe.evaluate.probe.trials import TOLD

_CHOSEN_ON = 4  # noise images, where a single picture leaves no other ones to choose channels on


@dataclass(frozen=True)
class Question:
    """What is asked of every kind of pictures.

    Attributes:
        target: the headline.
        step: one patch in step² is fitted.
        masks: choices of these patches for each image.
        regressor: see `fit_probe`.
        alpha: see `fit_probe`.
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


class Squares:
    """Image files as normalised squares for a model, read anew, one by one, whenever they are gone through.

    Args:
        paths: image files; every page of a stack is an image.
        model: a timm model, see `vispe.backbones.timm.read_squares`.
    """

    def __init__(self, paths: Sequence[str | Path], model: nn.Module) -> None:
        self.paths, self.model = paths, model

    def __iter__(self) -> Iterator[Tensor]:
        yield from read_squares(self.paths, self.model)


class Textures:
    """Generated textures for a model, rendered anew whenever they are gone through, see `texture_images`.

    Args:
        n: number of pictures.
        model: a timm model.
        seed: of the samples.
    """

    def __init__(self, n: int, model: nn.Module, seed: int = 0) -> None:
        self.n, self.model, self.seed = n, model, seed

    def __iter__(self) -> Iterator[Tensor]:
        return texture_images(self.n, self.model, self.seed)


def probe_source(
    model: nn.Module,
    source: str,
    what: Sequence[str | Path] | int,
    question: Question,
    shown: Callable[[Iterable[Tensor], str], Iterable[Tensor]] = lambda found, words: found,
) -> SourceProbe:
    """Put all questions to a model on one kind of pictures.

    Args:
        model: a timm model in evaluation mode.
        source: 'images', 'noise' or 'textures'.
        what: the files of images, or the number of pictures.
        question: what is asked.
        shown: is given the pictures that are gone through and words, and gives the pictures back: for a progress bar.
    """
    rng = np.random.default_rng(question.seed)
    if source == "noise":
        found = noise_images(what, model, rng)
    else:
        found = Squares(what, model) if source == "images" else Textures(what, model, question.seed)
    fit = {"step": question.step, "masks_per_image": question.masks}
    fit |= {"regressor": question.regressor, "alpha": question.alpha}
    headline = question.target
    probe = positional_probe(
        model, shown(found, f"probing {source}"), targets=(headline, *TARGETS), generator=rng, **fit
    )
    layers = baselines = None
    fit |= {"targets": (headline, *TOLD), "generator": question.seed}
    if question.layers:
        layers = probe_layers(model, shown(found, f"probing {source} after every block"), **fit)
    if question.baselines:
        blank = 4 if question.blank is None else question.blank
        alone = probe.n_images == 1 and isinstance(blank, int)
        others = noise_images(_CHOSEN_ON, model, np.random.default_rng([question.seed, 1])) if alone else None
        once = _Shown(found, shown, f"remedies on {source}")
        baselines = probe_baselines(model, once, blank=blank, choose_on=others, shifts=question.shifts, **fit)
    return SourceProbe(probe, layers, baselines)


class _Shown:
    """Pictures that show their progress each time they are gone through."""

    def __init__(
        self, found: Iterable[Tensor], shown: Callable[[Iterable[Tensor], str], Iterable[Tensor]], words: str
    ) -> None:
        self.found, self.shown, self.words = found, shown, words

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.shown(self.found, self.words))
