"""Scores of label maps: against ground truth, between label maps, and summarised over images."""

from vispe.segment.metrics.clusters import adjusted_rand, adjusted_rand_index, apply_mapping, match_clusters
from vispe.segment.metrics.ground_truth import scores
from vispe.segment.metrics.overlap import class_percentages, confusion, ious, mean_iou, miou, without_borders
from vispe.segment.metrics.summary import summarize

__all__ = [
    "adjusted_rand",
    "adjusted_rand_index",
    "apply_mapping",
    "class_percentages",
    "confusion",
    "ious",
    "match_clusters",
    "mean_iou",
    "miou",
    "scores",
    "summarize",
    "without_borders",
]
