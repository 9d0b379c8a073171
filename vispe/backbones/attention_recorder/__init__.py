"""Observation of the attention of every layer during a forward pass, without changing the model.

A pre-hook on each attention layer passes its arguments to vispe's implementation of that kind of layer, which returns
queries, keys, bias and rotation as one `Call`. Attention maps are computed from the `Call` as in the
reference backend. The layer itself then runs unchanged, so outputs are bit-identical. The hooks are removed
afterwards.
"""

from vispe.backbones.attention_recorder.layers import attention_layers, prefix_names, tower_of
from vispe.backbones.attention_recorder.observation import LayerAttention, attention_map, logits_of
from vispe.backbones.attention_recorder.recording import check_evaluation, reading_attention, record_attention

__all__ = [
    "LayerAttention",
    "attention_layers",
    "attention_map",
    "check_evaluation",
    "logits_of",
    "prefix_names",
    "reading_attention",
    "record_attention",
    "tower_of",
]
