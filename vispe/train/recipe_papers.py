"""Papers of training recipes, remedies, benchmarks, segmentation and inference methods that are not registered classes.

Each paper is "Title" or "Title, https://...". A title without a link has no identifier that we could verify. Encodings,
position schemes and measures have their papers on their classes; `vispe cite` prints all of them.
"""

from __future__ import annotations

DINO_SAW = (
    "What DINO saw: ALiBi positional encoding reduces positional bias, https://arxiv.org/abs/2603.16840"
)
FRANCA = "Franca, https://arxiv.org/abs/2507.14137"
LORA = "LoRA: Low-Rank Adaptation of Large Language Models, https://arxiv.org/abs/2106.09685"
LOOPE = (
    "LOOPE: Learnable Optimal Patch Order in Positional Embeddings for Vision Transformers, "
    "https://arxiv.org/abs/2504.14386"
)
LENGTH = (
    "The Impact of Positional Encoding on Length Generalization in Transformers, "
    "https://arxiv.org/abs/2305.19466"
)

RECIPE_PAPERS: dict[str, tuple[str, ...]] = {
    # training
    "retrofit": (DINO_SAW,),
    "lora": (LORA,),
    "order_invariance": ("PAPEFT (position-aware parameter-efficient fine-tuning)", LORA),
    "slot_distillation": ("Pos2Distill, https://github.com/AMAP-ML/Pos2Distill",),
    "mirrored_pairs": ("Probing the Role of Positional Information in Vision-Language Models",),
    "simultaneous_translation": ("LLM as Effective Streaming Processor, https://arxiv.org/abs/2505.16983",),
    # remedies without training
    "debias": (DINO_SAW,),
    "registers": (
        "Vision Transformers Don't Need Trained Registers, https://arxiv.org/abs/2506.08010",
        "Vision Transformers Need Registers, https://arxiv.org/abs/2309.16588",
    ),
    **dict.fromkeys(("poses", "positions", "svd", "blank"), (DINO_SAW,)),
    "d4_average": (DINO_SAW,),
    "rasa": (FRANCA,),
    "d4_rasa": (FRANCA, DINO_SAW),
    # evaluation
    "linear_probe": (DINO_SAW,),
    "effective_receptive_field": (
        "Understanding the Effective Receptive Field in Deep Convolutional Neural Networks, "
        "https://arxiv.org/abs/1701.04128",
    ),
    "three_cell": (LOOPE,),
    "pesi": (LOOPE,),
    "rotation": (
        "The Lie Derivative for Measuring Learned Equivariance, https://arxiv.org/abs/2210.02984",
        "StyleGAN3, https://arxiv.org/abs/2106.12423",
    ),
    "padding_pattern": (
        "Unveiling The Mask of Position-Information Pattern Through the Mist of Image Features",
    ),
    "extrapolation": (LENGTH,),
    "head_divergence": (LENGTH,),
    # interventions at inference
    "channel_scaling": (
        "Mitigate Position Bias in Large Language Models via Scaling a Single Dimension, "
        "https://arxiv.org/abs/2406.02536",
    ),
    "calibrated_attention": (
        "Found in the Middle: Calibrating Positional Attention Bias Improves Long Context Utilization, "
        "https://arxiv.org/abs/2406.16008",
    ),
    "low_rank_bias": (
        "FlashBias: Fast Computation of Attention with Bias, https://arxiv.org/abs/2505.12044",
    ),
    "unrotated_bands": ("DoPE (denoising rotary position embedding)",),
    # segmentation
    "segment": (
        "Adjusting the Outputs of a Classifier to New a Priori Probabilities: A Simple Procedure (Saerens, Latinne "
        "and Decaestecker, Neural Computation 14, 2002)",
        "Extremely randomized trees (Geurts, Ernst and Wehenkel, Machine Learning 63, 2006)",
    ),
    "objects": (
        "Notes on the estimation of the numerical density of arbitrary profiles: the edge effect (Gundersen, Journal "
        "of Microscopy 111, 1977)",
    ),
}
"""Papers by the name of the recipe."""
