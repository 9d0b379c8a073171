"""Equivariance of features and segmentations to rotations, reflections and shifts of the image.

Every function takes a callable and images and returns records with one value per image (`Measurement`); a
`RotationResult` holds records and provides table and verdict. Images are streamed: memory is bounded by a batch.
"""

from vispe.backbones.batching import PerImage
from vispe.backbones.distributed import Processes
from vispe.backbones.model_access import reinitialized_copy
from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.rotation.distributed import merge
from vispe.evaluate.rotation.evaluation import measure
from vispe.evaluate.rotation.metrics.accuracy import across_poses
from vispe.evaluate.rotation.metrics.any_angle import angle_equivariance
from vispe.evaluate.rotation.metrics.clusters import cluster_consistency
from vispe.evaluate.rotation.metrics.controls import control_rows
from vispe.evaluate.rotation.metrics.equivariance import (
    equivariance,
    orbit_average,
    position_equivariance,
    raw_intensity,
)
from vispe.evaluate.rotation.metrics.fingerprint import Fingerprint, fingerprint, random_crops
from vispe.evaluate.rotation.metrics.layer_curve import layer_curve, position_r2
from vispe.evaluate.rotation.metrics.lie_derivative import lie_derivative, lie_derivatives
from vispe.evaluate.rotation.metrics.quadrant_gap import quadrant_gap, scribble_classifier
from vispe.evaluate.rotation.metrics.segmentation_consistency import (
    angle_consistency,
    consistency,
    phase_consistency,
)
from vispe.evaluate.rotation.metrics.translation import crop_shift, roll_equivariance
from vispe.evaluate.rotation.plan import ANGLES, GROUPS
from vispe.evaluate.rotation.records import Measurement, relabelled
from vispe.evaluate.rotation.report import RotationReport
from vispe.evaluate.rotation.result import RotationResult
from vispe.evaluate.saved_segmenter import SavedSegmenter
from vispe.images.symmetry.d4 import D4, IDENTITY, Element, element, fit_to_patches
from vispe.images.symmetry.warp import Canvas, rotate
from vispe.utils.report.statistics import Summary, paired_difference, summarise

__all__ = [
    "ANGLES",
    "D4",
    "GROUPS",
    "IDENTITY",
    "Canvas",
    "Element",
    "Fingerprint",
    "Measurement",
    "PerImage",
    "Processes",
    "RotationReport",
    "RotationResult",
    "SavedSegmenter",
    "Summary",
    "VisionModel",
    "across_poses",
    "angle_consistency",
    "angle_equivariance",
    "cluster_consistency",
    "consistency",
    "control_rows",
    "crop_shift",
    "element",
    "equivariance",
    "fingerprint",
    "fit_to_patches",
    "layer_curve",
    "lie_derivative",
    "lie_derivatives",
    "measure",
    "merge",
    "orbit_average",
    "paired_difference",
    "phase_consistency",
    "position_equivariance",
    "position_r2",
    "quadrant_gap",
    "random_crops",
    "raw_intensity",
    "reinitialized_copy",
    "relabelled",
    "roll_equivariance",
    "rotate",
    "scribble_classifier",
    "summarise",
]
