"""Segmentation of micrographs from scribbles, without labels, or with the model of an earlier run."""

from vispe.segment.objects.options import ObjectOptions
from vispe.segment.pipeline.feature_files import store_features
from vispe.segment.pipeline.segmentation import apply, segment
from vispe.segment.run.request import DEFAULT
from vispe.segment.run.run_state import MODEL_NAME
from vispe.segment.run.scoring import ScoreOptions
from vispe.segment.types import LabelOptions, PostProcessing, ReadOptions

__all__ = [
    "DEFAULT",
    "MODEL_NAME",
    "LabelOptions",
    "ObjectOptions",
    "PostProcessing",
    "ReadOptions",
    "ScoreOptions",
    "apply",
    "segment",
    "store_features",
]
