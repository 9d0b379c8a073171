"""Sources of random images for the tests of batches."""

import itertools

import numpy as np
import torch

from vispe.errors import InputError
from vispe.train.data import Source

PLAIN = {"mean": (0, 0, 0), "std": (1, 1, 1)}


class RandomImages(Source):
    """Random images of given shapes; `damaged` ones raise."""

    def __init__(self, shapes, seed=0, damaged=()):
        self.shapes, self.seed, self.damaged = list(shapes), seed, damaged

    def __len__(self):
        return len(self.shapes)

    def __getitem__(self, i):
        if i in self.damaged:
            raise InputError(f"{self.name(i)} is truncated; copy it again.")
        h, w = self.shapes[i]
        rng = np.random.default_rng([self.seed, i])
        grey = torch.from_numpy(rng.random((1, h, w), np.float32)).expand(3, -1, -1)
        return grey if i % 2 else torch.from_numpy(rng.random((3, h, w), np.float32))

    def describe(self):
        return {"kind": "pictures", "count": len(self), "where": "here", "licence": ""}

    def fingerprint(self):
        return f"{self.seed}{self.shapes}"


class Numbers(RandomImages):
    """Image i is i / 1000 everywhere."""

    def __getitem__(self, i):
        return torch.full((3, *self.shapes[i]), i / 1000)


def take(iterator, count):
    """Return the first few of an iterator."""
    return list(itertools.islice(iterator, count))
