"""Processors of tiny models, built without downloads."""

from typing import Any

import pytest

from tests.hosts.transformers.tiny import IMAGE, PATCH, SIDE

transformers = pytest.importorskip("transformers", reason="vispe[vlm] is not installed")

CHAT = (
    "{% for m in messages %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
)


def llava_processor() -> Any:
    """Return a processor for words w0 to w249 and images of 3 x 3 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{k}": k for k in range(250)} | {"<eos>": 250, "<image>": IMAGE}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="<eos>", unk_token="w0", additional_special_tokens=["<image>"]
    )
    side = {"height": SIDE * PATCH, "width": SIDE * PATCH}
    images = transformers.CLIPImageProcessor(size=side, crop_size=side, do_center_crop=False)
    return transformers.LlavaProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="full", image_token="<image>"
    )
