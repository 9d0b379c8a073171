"""Feature-based segmentation of micrographs: images in, label maps, overlays and reports out.

`segment` and `apply` are the functions behind the command line, `Live` follows scribbles interactively, and
`measure_invariance` tests whether the result depends on the pose of the sample. Importing this package alone imports
none of the scientific libraries.
"""

from typing import TYPE_CHECKING

from vispe._lazy import lazy_exports

if TYPE_CHECKING:
    from vispe.segment.features.feature_config import FeatureConfig
    from vispe.segment.invariance_report import measure_invariance
    from vispe.segment.live.live_segmentation import Live
    from vispe.segment.pipeline import LabelOptions, PostProcessing, ReadOptions, ScoreOptions, apply, segment
    from vispe.segment.text.prompts import Prompts

__all__ = [
    "FeatureConfig",
    "LabelOptions",
    "Live",
    "PostProcessing",
    "Prompts",
    "ReadOptions",
    "ScoreOptions",
    "apply",
    "measure_invariance",
    "segment",
]

_HOMES = dict.fromkeys(__all__, "vispe.segment.pipeline") | {
    "FeatureConfig": "vispe.segment.features.feature_config",
    "Live": "vispe.segment.live.live_segmentation",
    "Prompts": "vispe.segment.text.prompts",
    "measure_invariance": "vispe.segment.invariance_report",
}
__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
