"""Mixins of the classes of converted vision-language models.

Models pickled by earlier versions refer to the mixins as attributes of this package.
"""

from vispe.hosts.transformers.language.converted_classes.generation import PositionedGeneration
from vispe.hosts.transformers.language.converted_classes.layer import PositionedLayer
from vispe.hosts.transformers.language.converted_classes.model import PositionedModel, PositionedText

__all__ = ["PositionedGeneration", "PositionedLayer", "PositionedModel", "PositionedText"]
