"""Runs of the segmentation: inputs, training, prediction, results, and resuming after an interruption."""
