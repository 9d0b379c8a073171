"""`vispe convert-weights`: rename released checkpoints to vispe's parameter names."""

from typing import Literal

from vispe.errors import counted

POSITIONALS = ("src", "dst")


def convert_weights(
    src: str,
    dst: str,
    from_: Literal["dino-saw", "rope-vit", "deit-irpe", "convit", "cpvt", "twins"] | None = None,
    num_heads: int | None = None,
    spec: str | None = None,
    key: str | None = None,
    force: bool = False,
    json: bool = False,
) -> None:
    """Rename the weights of a released checkpoint to vispe's names.

    The kind is detected from the parameter names: learned slopes of dino-saw (blocks.0.attn.m), mixed rotation of
    rope-vit (freqs), tables of DeiT with iRPE (blocks.0.attn.rpe_k.lookup_table_weight), gates of ConViT
    (blocks.0.attn.gating_param), convolutions of CPVT and Twins (pos_block.0.proj.weight). All other names are
    unchanged. The report names the pos_embed with which the file can be loaded.

    Args:
        src: checkpoint file, safetensors or torch; only tensors and plain values are read from it.
        dst: file to write; the suffix is .safetensors, .pt, .pth or .bin.
        from_: kind of the checkpoint; detected by default.
        num_heads: number of heads, if it cannot be inferred from the weights; default one per 64 channels.
        spec: the encoding, if it is not one of the published configurations.
        key: key of the state dict in a training checkpoint; default state_dict or model.

    Examples:
        vispe convert-weights deit_tiny_irpe.pth deit_tiny_irpe.safetensors
        vispe convert-weights mixed.pth mixed.safetensors --from rope-vit --num-heads 6
    """
    from json import dumps
    from pathlib import Path

    from vispe.errors import InputError
    from vispe.hosts.checkpoints import released, weight_files
    from vispe.utils.files import atomic_path, check_writable

    if not Path(src).is_file():
        raise InputError(f"convert-weights: file {src} does not exist.")
    if Path(dst).suffix not in weight_files.SUFFIXES:
        raise InputError(
            f"convert-weights: {dst} must end in {', '.join(weight_files.SUFFIXES)}, which selects the format."
        )
    check_writable([dst], force, protect=[src])
    weights, rest = weight_files.read_weights(src, key)
    done = released.convert_weights(weights, from_, num_heads=num_heads, spec=spec)
    with atomic_path(dst, force) as temporary:
        weight_files.write_weights(temporary, done.weights, note=done.specs[0])
    if json:
        report = {
            "kind": done.kind,
            "pos_embed": list(done.specs),
            "renamed": [list(pair) for pair in done.renamed],
            "dropped": list(done.dropped),
            "kept": done.unchanged,
            "left_out": rest,
            "notes": list(done.notes),
            "written": dst,
        }
        print(dumps(report, indent=2))
        return
    print(f"{src} is a {done.kind} checkpoint")
    for old, new in done.renamed:
        print(f"  {old} -> {new}")
    for name in done.dropped:
        print(f"  {name} dropped: computed from the grid")
    for name in rest:
        print(f"  {name} skipped: not part of the state dict")
    for note in done.notes:
        print(f"  {note}")
    print(f"{dst}: {counted(len(done.renamed), 'entry')} renamed, {done.unchanged} unchanged")
    print(f"load it with pos_embed={' or '.join(repr(s) for s in done.specs)}")
