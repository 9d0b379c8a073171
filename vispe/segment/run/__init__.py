"""A run on images: inputs, training, prediction, results, and going on after an interruption."""
