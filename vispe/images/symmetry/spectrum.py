"""Low-pass filter that matches the power spectrum of an image to that of its rotated version."""

import torch
from torch import Tensor

from vispe.errors import require

_RINGS = 16  # frequency bins from 0 to 0.5 cycles per pixel


def match_spectrum(image: Tensor, posed: Tensor) -> Tensor:
    """Return `image`, unrotated, low-pass filtered to the power spectrum of its rotated version.

    This isolates the effect of the blur of resampling from rotation. The gain decreases with spatial frequency and is
    at most 1: the isotonic fit of sqrt(P_posed/P_image), both averaged over rings of equal frequency under a radial
    Hann window, in which both show the same part of the sample. It is applied to the image reflected at its borders.

    Args:
        image: (b, c, n, n).
        posed: the same windows after rotation.

    Raises:
        MissingExtra: scikit-learn, used for the isotonic fit, is not installed.
    """
    require("sklearn", "cli", "the blur control of arbitrary angles")
    # radial Hann window: both images show the same part of the sample in it
    n = image.shape[-1]
    offset = torch.arange(n, dtype=torch.float64, device=image.device) - (n - 1) / 2
    radius = torch.hypot(offset[:, None], offset[None, :]) * (2 / n)
    window = torch.where(radius < 1, (1 + torch.cos(torch.pi * radius)) / 2, torch.zeros_like(radius))
    # gain (b, rings): the decreasing ratio of amplitudes, one value per ring of equal frequency
    frequency = torch.fft.fftfreq(n, dtype=torch.float64, device=image.device)
    ring = (torch.hypot(frequency[:, None], frequency[None, :]) * 2 * _RINGS).long()
    before, after = (_ring_power(x.double(), window, ring) for x in (image, posed))
    gain = torch.stack([_decreasing_gain(b, a) for b, a in zip(before, after, strict=True)]).to(image.device)
    # reflected at the borders, the periodic extension of the FFT is continuous
    mirrored = torch.cat([image, image.flip(-1)], -1)
    mirrored = torch.cat([mirrored, mirrored.flip(-2)], -2)
    # gains belong to the centres of rings and are interpolated linearly between them
    frequency_2n = torch.fft.fftfreq(2 * n, dtype=torch.float64, device=image.device)
    ring_coord = torch.hypot(frequency_2n[:, None], frequency_2n[None, :]) * 2 * _RINGS - 0.5
    low = ring_coord.floor().long().clamp(0, gain.shape[-1] - 1)
    high = (ring_coord.floor().long() + 1).clamp(0, gain.shape[-1] - 1)
    fraction = (ring_coord - ring_coord.floor()).clamp(0, 1)
    gain_2d = gain[:, low] * (1 - fraction) + gain[:, high] * fraction
    out = torch.fft.ifft2(torch.fft.fft2(mirrored) * gain_2d[:, None].to(image.dtype)).real
    return out[..., :n, :n].contiguous()


def _ring_power(x: Tensor, window: Tensor, ring: Tensor) -> Tensor:
    """Return the power per ring, summed over channels, (b, rings)."""
    weight = window / window.sum()
    centred = x - (x * weight).sum((-2, -1), keepdim=True)
    power = torch.fft.fft2(centred * window).abs().square().sum(1).flatten(1)
    sums = torch.zeros(len(x), int(ring.max()) + 1, dtype=x.dtype, device=x.device)
    return sums.index_add(1, ring.flatten(), power)


def _decreasing_gain(before: Tensor, after: Tensor) -> Tensor:
    """Return the gain per ring (rings,), decreasing from at most 1; weighted by power, so empty rings are ignored."""
    from sklearn.isotonic import IsotonicRegression

    power = before.cpu().numpy()
    if power.sum() == 0:
        return torch.ones_like(before, device="cpu")
    ratio = after.cpu().numpy() / power.clip(min=power.max() * 1e-12)
    fit = IsotonicRegression(y_min=0, y_max=1, increasing=False)
    fitted = fit.fit_transform(range(len(power)), ratio, sample_weight=power.clip(min=power.max() * 1e-12))
    return torch.from_numpy(fitted).double().sqrt()
