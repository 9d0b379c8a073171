"""The position schemes; importing this package registers them."""

from vispe.multimodal.schemes import circle as circle
from vispe.multimodal.schemes import diagonal as diagonal
from vispe.multimodal.schemes import group_pe as group_pe
from vispe.multimodal.schemes import mrope as mrope
from vispe.multimodal.schemes import omni as omni
from vispe.multimodal.schemes import ppe as ppe
from vispe.multimodal.schemes import sharing as sharing
from vispe.multimodal.schemes import tiles as tiles
from vispe.multimodal.schemes import v2pe as v2pe
from vispe.multimodal.schemes import vrope as vrope
