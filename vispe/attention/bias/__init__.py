"""The closed vocabulary of biases: what is added to the logits, as a description that backends read."""

from vispe._lazy import face

__all__ = ["Bias", "DenseBias", "DistanceBias", "LowRankBias", "Request", "SumBias"]

__getattr__, __dir__ = face(
    __name__,
    dict.fromkeys(("Request", "Bias"), "vispe.attention.bias.base")
    | dict.fromkeys(("DistanceBias",), "vispe.attention.bias.distance")
    | dict.fromkeys(("LowRankBias", "DenseBias", "SumBias"), "vispe.attention.bias.dense"),
)
