"""The closed vocabulary of biases: what is added to the logits, as a description that backends read."""

from vispe.attention.bias.abstract_bias import Bias, Request
from vispe.attention.bias.dense import DenseBias, LowRankBias, SumBias
from vispe.attention.bias.distance_bias import DistanceBias

__all__ = ["Bias", "DenseBias", "DistanceBias", "LowRankBias", "Request", "SumBias"]
