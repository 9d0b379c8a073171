"""`convert`, `restore` and `describe`: the same three words for every host."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from vispe.encodings.registry import Spec
from vispe.errors import OptionError, UnsupportedHost
from vispe.hosts.common.convert import converted_parts, in_words, put_in, take_out
from vispe.hosts.common.host_spec import read
from vispe.hosts.timm.convert import convert_timm, describe_timm, restore_timm
from vispe.hosts.timm.families import family_of
from vispe.hosts.transformers.diagnosis import check_no_scheme
from vispe.hosts.transformers.version import check_version
from vispe.hosts.unwrap import opened, unknown, unwrapped
from vispe.hosts.windows import families

M = TypeVar("M", bound=nn.Module)


def convert(
    model: M, spec: Spec | None = None, *, keep_abs: bool = False, keep_rope: bool = False, **options: Any
) -> M:
    """Exchange the positional encoding of a model, in place; all checks come before the first change.

    Weights keep their names, so stock checkpoints load strictly before or after. The spec names everything that the
    model will know about position: its own absolute table and its own rotary embedding (of Eva and NaFlexVit) are
    put aside until `restore`, so ``'none'`` leaves none, unless they are kept. A converted model can be converted
    again. A `UserWarning` says where `rope_axial` has less than half the temperature that the grid needs; `describe`
    says any that is too small.

    Example:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=2)
        >>> convert(model, 'alibi2d(slopes=learned)').vispe.spec
        [{'name': 'alibi2d', 'slopes': 'learned'}]

    Args:
        model: a timm `VisionTransformer` (DeiT distilled included), `Eva` or `NaFlexVit`; or a model of open_clip,
            or its `visual`, where the image tower is meant; or a vision-language model of transformers (Qwen2-VL,
            Qwen2.5-VL, Qwen3-VL, LLaVA, LLaVA-OneVision, InternVL), where a position scheme goes into the language
            model and an encoding into the vision tower; or a vision model of transformers, with or without a head
            (ViT, DeiT, ViTMSN, ViTMAE, I-JEPA, Pixio, BEiT, DINOv2, DINOv3, CLIP, SigLIP, SigLIP 2, SAM; VideoMAE and
            V-JEPA 2, with encodings of three axes); or timm's SAM and Swin, or torchvision's ViT and Swin, where each
            attention layer gets an encoding of its window.
            `torch.nn.DataParallel` and timm's ``features_only`` models are looked through; wrappers that know
            parameters or code already are refused.
        spec: name and options of an encoding or a position scheme, as text, dict or finished `Encoding`, or position
            schemes of layers (`vispe.multimodal.alternating`); a sum
            may name what stays of the model's own: ``learn`` says the same as `keep_abs`, ``rope`` the same as
            `keep_rope`, and either may stand alone. Weights of an `Encoding` are copied, into every layer where each
            layer has its own. Without a spec a model of transformers gets what its configuration names; weights of an
            encoding come by `vispe.from_pretrained` only.
        keep_abs: keep the model's own absolute table in use beside the encoding.
        keep_rope: keep the model's own rotary embedding in use beside the encoding.
        **options: options of the encoding or the scheme; for a scheme also ``late_rotation=True``, which turns queries
            and keys inside the attention and caches keys without positions; ``parallel='graph_kv'`` or ``'pine'``, with
            which images that stand together have no order; and ``self_extend=(group, window)``, with which tokens that
            far apart count in groups.

    Returns:
        the same model.

    Raises:
        UnsupportedHost: the model, or one of its attention layers, is not of a kind that vispe knows.
        UnsupportedCombination: the encoding has no place in it.
        UnknownEncoding, OptionError: the spec is not right.
        InputError: there is no spec, and the configuration of the model names none.
    """
    given, model = model, unwrapped(model)
    if spec is None:
        _convert_named(model, {**options, "keep_abs": keep_abs, "keep_rope": keep_rope})
        return given
    if host := _open_clip(model):
        check_no_scheme(model, spec)
        host.convert_image_tower(model, spec, keep_abs=keep_abs, keep_rope=keep_rope, **options)
        return given
    if host := _transformers(model):
        host.convert_transformers(model, spec, keep_abs=keep_abs, keep_rope=keep_rope, **options)
        return given
    family = families.family_of(model)
    if family is None and family_of(model) is None:
        raise UnsupportedHost(unknown(model))
    check_no_scheme(model, spec)
    wanted = read(spec, options, keep_abs, keep_rope)
    if family is not None:
        put_in(model, family, wanted)
    else:
        convert_timm(model, wanted)
    return given


def _convert_named(model: nn.Module, options: dict[str, Any]) -> None:
    """Convert a model of transformers to what its configuration names; all options come from there, too."""
    given = [name for name, value in options.items() if value]
    host = _transformers(model)
    if host is None or given:
        why = (
            f"options were given ({', '.join(given)})" if given else f"a {type(model).__name__} has no config"
        )
        raise OptionError(
            f"vispe.convert was called without an encoding or position scheme, which only the configuration of a model "
            f"of transformers can name; here {why}. Say which, as in vispe.convert(model, 'alibi2d')."
        )
    host.convert_named(model)


def restore(model: M) -> M:
    """Give a converted model its own classes, absolute table and rotary embedding back, in place.

    Outputs are those of before, bit for bit, if no weight has changed; weights trained since stay.

    Example:
        >>> import timm
        >>> model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=2)
        >>> type(restore(convert(model, 'alibi2d')))
        <class 'timm.models.vision_transformer.VisionTransformer'>

    Raises:
        UnsupportedHost: the model is not converted.
        UnsupportedCombination: the model was built with the encoding, so there is no table to bring back.
    """
    given, model = model, unwrapped(model, "restore")
    if host := _open_clip(model):
        host.restore_image_tower(model)
    elif host := _transformers(model):
        host.restore_transformers(model)
    elif family := families.family_of(model):
        take_out(model, family)
    else:
        restore_timm(model)
    return given


def describe(model: nn.Module) -> str:
    """Return what is attached where: encodings, parameters, backends. Models inside others are found.

    Example:
        >>> import timm
        >>> print(describe(timm.create_model('vit_tiny_patch16_224', img_size=32, depth=2, pos_embed='alibi2d')))
        VisionTransformer with {'name': 'alibi2d'}
          grid (2, 2), trained at (2, 2), 1 prefix tokens
          absolute table: none
          pos_enc: alibi2d, 0 parameters
          2 attention layers swapped; backend auto
    """
    model = opened(model)
    if host := _transformers(model):
        return host.describe_transformers(model)
    texts = [(name, _described(m)) for name, m in converted_parts(model)]
    if texts:
        return "\n".join(f"{name}: {text}" if name else text for name, text in texts)
    return f"{type(model).__name__} without an encoding of vispe; vispe.convert(model, 'alibi2d') adds one."


def _described(model: nn.Module) -> str:
    if host := _open_clip(model):
        return host.describe_tower(model)
    family = families.family_of(model)
    return in_words(model, family) if family else describe_timm(model)


def _open_clip(model: nn.Module) -> Any:
    """Return what converts models of open_clip if this is one, and import it only then; else None."""
    if not _made_by(model, "open_clip"):
        return None
    from vispe.hosts.open_clip import convert as host

    return host


def _transformers(model: nn.Module) -> Any:
    """Return what converts models of transformers if this is one, and import it only then; else None.

    Raises:
        MissingExtra: the transformers that is installed is too old.
    """
    if not _made_by(model, "transformers"):
        return None
    check_version()
    from vispe.hosts.transformers import convert as host

    return host


def _made_by(model: nn.Module, library: str) -> bool:
    return any(c.__module__.partition(".")[0] == library for c in type(model).__mro__)
