"""External memory of attention: selected keys, their positions, biases and gradients."""

import pytest
import torch

from tests.cases import cases
from tests.encodings.parts.rotary.pairwise_inputs import inputs, line, rotation
from vispe.attention import DenseBias, attention
from vispe.attention.call import Call
from vispe.errors import OptionError, ShapeError, UnsupportedCombination
from vispe.experimental.extended_mind import ExternalMemory, attend_with_external_memory, external_memory_bias


@cases("mode", ["unturned", "reference"])
@cases(("topk", "threshold"), [(1, None), (3, 0.1), (50, None), (4, 2.0)])
def test_memories_query_by_query(mode, topk, threshold):
    q, k, v = inputs(n=6)
    bank, values = (x[:, :, :9] for x in inputs(n=9, seed=1)[1:])
    call = Call(q, k, v, transform=rotation(line(6)), is_causal=True, enable_gqa=True)
    y = attend_with_external_memory(
        call, ExternalMemory(bank, values), topk=topk, threshold=threshold, mode=mode
    )
    rotated, rotated_k = rotation(line(6)).query(q), rotation(line(6)).key(k)
    for b in range(2):
        for h in range(4):
            for i in range(6):
                compared = (rotated if mode == "reference" else q)[b, h, i]
                cosine = torch.cosine_similarity(compared, bank[b, h // 2], -1)
                best = [int(j) for j in cosine.argsort(descending=True)[:topk]]
                best = [j for j in best if threshold is None or cosine[j] > threshold]
                keys = torch.cat([bank[b, h // 2, best], rotated_k[b, h // 2, : i + 1]])
                weights = (keys @ rotated[b, h, i] * 8**-0.5).softmax(0)
                expected = weights @ torch.cat([values[b, h // 2, best], v[b, h // 2, : i + 1]])
                torch.testing.assert_close(y[b, h, i], expected)


def test_memories_with_alibi_and_their_positions():
    q, k, v = inputs(n=5, kv_heads=4)
    bank = k[:1, :, :3].clone()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    self_bias = DenseBias(-slopes[None, :, None, None] * torch.ones(1, 4, 5, 5, dtype=torch.float64))
    call = Call(q, k, v, bias=self_bias, is_causal=True)
    y = attend_with_external_memory(
        call, ExternalMemory(bank, bank, bias=external_memory_bias(slopes, 5)), topk=3
    )
    keys = torch.cat([bank.expand(2, -1, -1, -1), k], 2)
    bias = torch.cat(
        [
            -5 * slopes[:, None, None].expand(4, 5, 3),
            self_bias.dense()[0].masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf),
        ],
        -1,
    )
    expected = attention(q, keys, torch.cat([bank.expand(2, -1, -1, -1), v], 2), bias=DenseBias(bias[None]))
    torch.testing.assert_close(y, expected)
    rotated = Call(q, k, v, transform=rotation(line(5)), is_causal=True)
    at_origin = attend_with_external_memory(rotated, ExternalMemory(bank, bank), topk=2)
    zero = rotation(torch.zeros(1, 3, 1, dtype=torch.float64))
    torch.testing.assert_close(
        attend_with_external_memory(rotated, ExternalMemory(bank, bank, "own", zero), topk=2), at_origin
    )
    far = rotation(torch.full((1, 1, 1), 9.0, dtype=torch.float64))
    last = attend_with_external_memory(rotated, ExternalMemory(bank, bank, "far", far), topk=2)
    assert (last - at_origin).abs().max() > 1e-3


def test_gradients_with_memories():
    q, k, v = (x[:1, :2, :4].clone().requires_grad_() for x in inputs(kv_heads=4))
    bank = inputs(kv_heads=4, seed=3)[1][:1, :2, :5].clone().requires_grad_()

    def run(q, k, v, bank):
        call = Call(q, k, v, transform=rotation(line(4)), is_causal=True)
        return attend_with_external_memory(call, ExternalMemory(bank, bank), topk=2)

    assert torch.autograd.gradcheck(run, (q, k, v, bank), fast_mode=True)


def test_wrong_memories_raise():
    q, k, v = inputs(n=5)
    call, bank = Call(q, k, v, enable_gqa=True), torch.ones(1, 4, 3, 8)
    with pytest.raises(ShapeError, match="batch size"):
        attend_with_external_memory(call, ExternalMemory(bank, bank), topk=2)
    with pytest.raises(OptionError, match="topk must be a positive integer"):
        attend_with_external_memory(call, ExternalMemory(bank[:, :2], bank[:, :2]), topk=0)
    ignored = ({"sinks": torch.ones(len(q[0]))}, {"softcap": 2.0}, {"return_lse": True})
    for arguments in (*ignored, {"dropout_p": 0.5}):
        other = Call(q, k, v, enable_gqa=True, **arguments)
        with pytest.raises(UnsupportedCombination, match=f"do not support {next(iter(arguments))}. Omit it"):
            attend_with_external_memory(other, ExternalMemory(bank[:, :2], bank[:, :2]), topk=2)
    with pytest.raises(OptionError, match="'own' needs the rotation"):
        ExternalMemory(bank, bank, "own")
