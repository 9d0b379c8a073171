"""Attention biases: additive terms of the logits, as descriptions that backends can match on."""

from vispe.attention.bias.abstract_bias import Bias
from vispe.attention.bias.dense import DenseBias, LowRankBias, SumBias
from vispe.attention.bias.dense_request import DenseRequest
from vispe.attention.bias.distance_bias import DistanceBias

__all__ = ["Bias", "DenseBias", "DenseRequest", "DistanceBias", "LowRankBias", "SumBias"]
