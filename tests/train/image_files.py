"""What is in the image files of the tests of sources, and what they are read as."""

import numpy as np
import torch

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (7, 11, 3), np.uint8)
GREY = RNG.integers(0, 256, (9, 5), np.uint8)
DEEP = RNG.integers(300, 9000, (6, 8), np.uint16)
STACK = RNG.integers(0, 256, (3, 5, 6), np.uint8)


def plain(image):
    """Return values of a file of 8 bits as they are read."""
    return torch.from_numpy(image.astype(np.float32) / np.float32(255))


def stretched(values):
    """Return values of a deeper file as they are read."""
    low, high = np.percentile(values, (0.5, 99.5))
    return torch.from_numpy(np.clip((values - low) / (high - low), 0, 1).astype(np.float32))
