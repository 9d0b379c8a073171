"""Types that several packages of the segmentation share: options, metadata of an image, and results of a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from vispe.errors import OptionError
from vispe.images.normalize import Normalization, Percentiles
from vispe.images.orientation import Frame, Orientation
from vispe.images.sample import parse_crop
from vispe.segment.classify.class_prior import PRIORS, Prior
from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.features.sample_grid import FeatureGrid
from vispe.utils.options import NonNegativeInt, Options, PositiveInt

Paths = Sequence[str | Path]


@dataclass(frozen=True)
class ReadOptions(Options):
    """Options of image reading and normalisation.

    Attributes:
        channel: channels to read, by number or name, such as '0,2'; None reads all.
        z: pages to read, a number or 'a:b'; None reads all.
        axes: axes of the stored array, such as 'ZYX'; None uses the metadata of the file.
        normalize: 'stack', 'image' or 'none': scope of one pair of grey limits.
        clip: percentiles that become black and white.
        scene: scene of multi-scene microscope files, by name or number (from 0).
        orientation: 'stored' reads pixels as they are stored, like Fiji, napari and ilastik; 'tag' applies the
            orientation tag of the file.
        crop: rows and columns of the sample, such as '0:884,0:1024'; pixels outside are excluded from all numbers.
        mask: files with 0 for pixels excluded from all numbers: one for all images, or several matched by name.

    Raises:
        OptionError: an invalid value.

    Example:
        >>> ReadOptions(z="0:10", crop="0:884,0:1024").normalize
        'stack'
    """

    channel: str | None = None
    z: str | None = None
    axes: str | None = None
    normalize: Normalization = "stack"
    clip: Percentiles = (0.5, 99.5)
    scene: str | None = None
    orientation: Orientation = "stored"
    crop: str | None = None
    mask: Paths | str | Path = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop is not None:
            parse_crop(self.crop)


@dataclass(frozen=True)
class LabelOptions(Options):
    """Options of label reading, as in `read_labels` of `vispe.images.labels.label_files`.

    Example:
        >>> LabelOptions(classes=["matrix", "pore"]).max_classes
        20
    """

    classes: Sequence[str] | None = None
    legend: str | Path | None = None
    dense: bool = False
    max_classes: PositiveInt = 20
    label_page: NonNegativeInt | None = None


@dataclass(frozen=True)
class PostProcessing(Options):
    """Post-processing of probabilities and labels.

    Attributes:
        smooth: radius in pixels of the square over which probabilities are averaged; 0 disables it.
        min_area: connected components of one class with fewer pixels get the class of the nearest larger component.
        prior: reweighting of classes learnt from labels, on each page: `'sqrt'`, by the square root of their
            estimated frequency; `'em'`, by the frequency; `'uniform'`, no reweighting. None means `'sqrt'`.
            Clusters and text are never reweighted.
        clean: whether probabilities are filtered with the image as guide (guided filter), before smoothing.

    Raises:
        OptionError: an unknown prior, or a negative radius or area.

    Example:
        >>> PostProcessing(smooth=2, prior="em")
        PostProcessing(smooth=2, min_area=0, prior='em', clean=False)
    """

    smooth: NonNegativeInt = 0
    min_area: NonNegativeInt = 0
    prior: Prior | None = None
    clean: bool = False

    def resolve_prior(self, classifier: object) -> str:
        """Return the entry of `PRIORS` that applies to a classifier.

        Raises:
            OptionError: a prior was requested, but the classes were not learnt from labels.
        """
        if isinstance(classifier, PixelClassifier):
            return self.prior or PRIORS[0]
        if self.prior is not None:
            raise OptionError(
                f"prior={self.prior!r} has no effect on clusters and text prompts, which have no learnt class "
                "frequencies. Omit it."
            )
        return "uniform"


class ImageFacts(Protocol):
    """Metadata of an image, in memory or read on demand.

    Attributes:
        path: the file or store.
        n_pages: number of pages.
        shape: height and width in pixels.
        channels: number of channels.
        channel_names: name of each channel, or ().
        pixel_size: microns per pixel (y, x); None if unknown.
        resolution: resolution tags of the file (x, y, unit); None if unknown.
        axis_lengths: lengths of the axes with more than one page.
        z_step: microns between pages along Z; None if unknown.
        frame_interval: seconds between pages along T; None if unknown.
        frame: orientation tag of the file.
        sample: (h, w) bool, pixels of the sample; None excludes none.
    """

    path: Path
    n_pages: int
    shape: tuple[int, int]
    channels: int
    channel_names: tuple[str, ...]
    pixel_size: tuple[float, float] | None
    resolution: tuple[float, float, str] | None
    axis_lengths: dict[str, int]
    z_step: float | None
    frame_interval: float | None
    frame: Frame
    sample: np.ndarray | None


@dataclass(frozen=True, eq=False)
class Areas:
    """Areas of the classes on a page, or on several.

    Attributes:
        pixels: (K,) float64, from the estimated frequencies, before cleaning, smoothing and `min_area`.
        doubt: (K,) float64, doubt of `area_estimate`, from which the interval is computed.
        priors: the estimated frequencies (K,) of each page.
        unweighed: (K,) float64, pixels under equal class frequencies.
    """

    pixels: np.ndarray
    doubt: np.ndarray
    priors: tuple[np.ndarray, ...]
    unweighed: np.ndarray

    def __add__(self, other: "Areas") -> "Areas":
        sums = (self.pixels + other.pixels, self.doubt + other.doubt, self.priors + other.priors)
        return Areas(*sums, self.unweighed + other.unweighed)


@dataclass(frozen=True, eq=False)
class Prediction:
    """The result for one page.

    Attributes:
        prob: (K, h, w) float32, reweighted by `PostProcessing.prior`, basis of labels and uncertainty; 0
            where there is no data.
        labels: (h, w) uint8, 1..K, 0 = no data.
        uncertainty: (h, w) float32, 1 - (largest - second largest probability); NaN = no data.
        overlap: number of pixels covered by more than one tile.
        disagreeing: number of these pixels for which two tiles predict different classes.
        notes: messages for the user.
        areas: areas of the classes; None without reweighting.
        feature_grid: summary of the features on a grid; None if the model has no reference to compare with.
    """

    prob: np.ndarray
    labels: np.ndarray
    uncertainty: np.ndarray
    overlap: int
    disagreeing: int
    notes: tuple[str, ...]
    areas: Areas | None = None
    feature_grid: FeatureGrid | None = None
