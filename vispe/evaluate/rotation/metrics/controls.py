"""Controls of equivariance: raw pixels, and the same architecture with random weights."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from vispe.backbones.batching import FeatureFunction
from vispe.backbones.model_access import reinitialized_copy
from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.rotation.metrics.equivariance import equivariance, position_equivariance, raw_intensity
from vispe.evaluate.rotation.record_key import POSITION_CODE, RANDOM, RAW
from vispe.evaluate.rotation.records import Measurement, relabelled
from vispe.images.symmetry.d4 import D4, Element


def control_rows(
    f: FeatureFunction,
    images: Iterable[Tensor],
    *,
    elements: Sequence[Element] = D4,
    measures: Sequence[str] = ("error", "error_uncentred"),
    batch_size: int = 1,
    seed: int = 0,
    twin: tuple[nn.Module, Sequence[str]] | None = None,
) -> tuple[tuple[Measurement, ...], tuple[str, ...]]:
    """Measure controls with a known result, and random weights, on the same images.

    The controls 'identity' and 'shuffled' are part of `equivariance`.

    Args:
        f: feature function; the control of random weights needs a `VisionModel`.
        images: (c, H, W) each, iterated once per control; iterables that are not sequences are read into memory.
        elements: poses; the identity is ignored.
        measures: names in `vispe.evaluate.rotation.feature_similarity.MEASURES`, and 'invariant_share'.
        batch_size: max number of images of equal size per batch.
        seed: random seed of the random weights.
        twin: return value of `reinitialized_copy` for the model of f, if available.

    Returns:
        Records marked as controls: 'raw intensity' (exactly 0), 'random weights' and, if the patch embedding is known,
        'random weights, position code'; and notes on unchanged parameters.

    Raises:
        OptionError: a measure is unknown, or there is no pose besides the identity.
        InputError: there are no images, or an image or a map has values that are not finite.
        ShapeError: an image is not (c, H, W), or `f` does not return one map per image.

    Example:
        >>> rows, notes = control_rows(raw_intensity, Tensor([[[[0.0, 1.0], [2.0, 3.0]]]]))
        >>> rows[0].part, rows[0].values.tolist(), notes
        ('raw intensity', [0.0], ('There is no control of random weights, which needs a model.',))
    """
    options = {"elements": elements, "measures": measures, "batch_size": batch_size}
    images = list(images) if not isinstance(images, Sequence | Tensor) else images
    rows = relabelled(equivariance(raw_intensity, images, controls=False, **options), RAW, control=True)
    if not isinstance(f, VisionModel):
        return rows, ("There is no control of random weights, which needs a model.",)
    net, unchanged = reinitialized_copy(f.model, seed) if twin is None else twin
    random_model = VisionModel(net, layer=f.layer, norm=f.norm)
    rows += relabelled(equivariance(random_model, images, controls=False, **options), RANDOM, control=True)
    if random_model.permutable:
        moved = position_equivariance(random_model, images, **options)
        rows += relabelled(moved, f"{RANDOM}, {POSITION_CODE}", control=True)
    notes = (f"The control of random weights keeps {', '.join(unchanged)}.",) if unchanged else ()
    return rows, notes
