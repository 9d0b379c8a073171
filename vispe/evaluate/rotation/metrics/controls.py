"""What the numbers are compared with: pixels themselves, and a network of the same kind that has learnt nothing."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from vispe.backbones.batching import FeatureFunction
from vispe.backbones.vision_model import ModelFeatures, patch_projection, random_twin
from vispe.evaluate.rotation.metrics.equivariance import equivariance, position_equivariance, raw_intensity
from vispe.evaluate.rotation.record_key import POSITION_CODE, RANDOM, RAW
from vispe.evaluate.rotation.records import Measurement, relabelled
from vispe.symmetry.d4 import D4, Element


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
    """Measure what is known beforehand, and what chance weights do, on the images of the measurement.

    `equivariance` brings the controls 'identity' and 'shuffled' itself.

    Args:
        f: what is measured; a `ModelFeatures` gets the control of random weights, for other functions it is not known
            what a random one would be.
        images: (c, H, W) each, gone through once for each control; what is not a sequence is read into memory.
        elements: poses; the identity is left out.
        measures: of `vispe.evaluate.rotation.comparison.MEASURES`, and 'invariant_share'.
        batch_size: images of equal size that f sees at once.
        seed: of the random weights.
        twin: what `random_twin` gave for f's model, if it was made before.

    Returns:
        Rows marked as controls: 'raw intensity' (0 exactly), 'random weights' and, where the patch embedding is known,
        'random weights, position code'; and notes on what was left as it is.

    >>> rows, notes = control_rows(raw_intensity, Tensor([[[[0.0, 1.0], [2.0, 3.0]]]]))
    >>> rows[0].part, rows[0].values.tolist(), notes
    ('raw intensity', [0.0], ('There is no control of random weights: they are known of models only.',))
    """
    options = {"elements": elements, "measures": measures, "batch_size": batch_size}
    images = list(images) if not isinstance(images, Sequence | Tensor) else images
    rows = relabelled(equivariance(raw_intensity, images, controls=False, **options), RAW, control=True)
    if not isinstance(f, ModelFeatures):
        return rows, ("There is no control of random weights: they are known of models only.",)
    net, kept = random_twin(f.model, seed) if twin is None else twin
    same = ModelFeatures(net, layer=f.layer, norm=f.norm)
    rows += relabelled(equivariance(same, images, controls=False, **options), RANDOM, control=True)
    if patch_projection(net) is not None:
        moved = position_equivariance(same, images, **options)
        rows += relabelled(moved, f"{RANDOM}, {POSITION_CODE}", control=True)
    notes = (f"The control of random weights keeps {', '.join(kept)}.",) if kept else ()
    return rows, notes
