"""Base classes of encodings: additive, rotary, bias and mixing (samplers: `vispe.encodings.parts.positions.sampler`).

An encoding is a final class that implements one or more of `Additive`, `Rotary`, `Biased` and `Mixing`.
Options are annotated attributes of the class, JSON-able, checked by their annotations, and keyword-only arguments of
the constructor, so that `Encoding.config` rebuilds an equal module.
"""

from vispe.encodings.base.description import HOST_FACTS, INFORMATION, INVARIANCES
from vispe.encodings.base.encoding import Encoding
from vispe.encodings.base.kinds import Additive, Biased, Mixing, Rotary

__all__ = [
    "HOST_FACTS",
    "INFORMATION",
    "INVARIANCES",
    "Additive",
    "Biased",
    "Encoding",
    "Mixing",
    "Rotary",
]
