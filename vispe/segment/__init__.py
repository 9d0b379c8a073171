"""Feature segmentation of micrographs: images in, label maps, overlays and reports out.

`segment` and `apply` are what the command line calls, `Live` follows a drawing, and `trust_page` asks whether the
answer depends on how the sample lies. Importing this package alone imports none of the scientific libraries.
"""

from typing import TYPE_CHECKING

from vispe._lazy import face

if TYPE_CHECKING:
    from vispe.segment.features.features import FeatureConfig
    from vispe.segment.live.engine import Live
    from vispe.segment.pipeline import Labelling, Post, Reading, Scoring, apply, segment
    from vispe.segment.text.prompts import Prompts
    from vispe.segment.trust import trust_page

__all__ = [
    "FeatureConfig",
    "Labelling",
    "Live",
    "Post",
    "Prompts",
    "Reading",
    "Scoring",
    "apply",
    "segment",
    "trust_page",
]

_HOMES = dict.fromkeys(__all__, "vispe.segment.pipeline") | {
    "FeatureConfig": "vispe.segment.features.features",
    "Live": "vispe.segment.live.engine",
    "Prompts": "vispe.segment.text.prompts",
    "trust_page": "vispe.segment.trust",
}
__getattr__, __dir__ = face(__name__, _HOMES)
