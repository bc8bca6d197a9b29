"""SPA (ICML 2025): two damaged views learn what the intact image shows, behind a trained matrix before the head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from nets import ConvNet
from torch import Generator, Tensor, nn

from oracles.common import Outcome, all_norms, sgd, step, with_batch_statistics
from oracles.lame import features_and_logits
from oracles.zerosiam import kl


def frequency_mask(count: int, channels: int, side: int, drop: float, rng: Generator) -> Tensor:
    """Ones but for the low frequencies that are dropped; the constant one is at (side / 2, side / 2)."""
    n, centre = int(side * 0.2), side // 2
    first = centre - n // 2
    kept = torch.rand(count, channels, n, n, generator=rng) >= drop
    mask = torch.ones(count, channels, side, side, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            row, column = first + i, first + j
            upper = row < centre or (row == centre and column >= centre)
            if upper:  # this half is drawn; each frequency's mirror image shares its fate
                mask[:, :, row, column] *= kept[:, :, i, j]
                if (row, column) != (centre, centre):
                    mask[:, :, 2 * centre - row, 2 * centre - column] *= kept[:, :, i, j]
    return mask


def without_low_frequencies(x: Tensor, mask: Tensor) -> Tensor:
    """Amplitudes times the mask, phases as they are."""
    spectrum = torch.fft.fftshift(torch.fft.fft2(x), dim=(-2, -1))
    changed = torch.polar(spectrum.abs() * mask, spectrum.angle())
    view: Tensor = torch.fft.ifft2(torch.fft.ifftshift(changed, dim=(-2, -1))).real
    return view


def with_patch_noise(x: Tensor, amount: Tensor, noise: Tensor) -> Tensor:
    """(1 - a^2) x + a^2 v in each patch, cut to [-1, 1]."""
    side, patches = noise.shape[-1], []
    for i in range(amount.shape[0]):
        row = []
        for j in range(amount.shape[1]):
            tile = x[:, :, i * side : (i + 1) * side, j * side : (j + 1) * side]
            row.append((1 - amount[i, j] ** 2) * tile + amount[i, j] ** 2 * noise)
        patches.append(torch.cat(row, dim=3))
    return torch.cat(patches, dim=2).clamp(-1, 1)


def rescaled(amount: Tensor, ratio: float) -> Tensor:
    """The mean square is the ratio, then no entry is beyond 1."""
    return (amount * (ratio / (amount**2).mean()) ** 0.5).clamp(-1, 1)


def spa(
    net: nn.Module, batches: list[Tensor], *, lr: float, rng: Generator, patch: int = 16, dropped: float | None = None
) -> Iterator[Outcome]:
    """Three optimisers: norm layers, the predictor, and the noise, which climbs; the plain head answers."""
    student = with_batch_statistics(net)
    convolutional = isinstance(student, ConvNet)
    theta, head = all_norms(student), student.fc if isinstance(student, ConvNet) else student.head
    drop, ratio = (0.1, 0.1) if convolutional else (0.2, 0.4)
    drop = drop if dropped is None else dropped
    predictor = nn.Parameter(torch.eye(head.in_features, dtype=head.weight.dtype))
    side = batches[0].shape[-1] // patch
    amount = nn.Parameter(torch.full((side, side), ratio**0.5, dtype=head.weight.dtype))
    norms, other = sgd(theta, lr), sgd([predictor], lr * (10 if convolutional else 5))
    noisy = sgd([amount], lr * (400 if convolutional else 100))
    for x in batches:
        logits = student(x)
        plain = logits.detach().log_softmax(1)
        mask = frequency_mask(len(x), x.shape[1], x.shape[-1], drop, rng)
        noise = torch.randn(x.shape[1], patch, patch, generator=rng).to(x)
        loss, taught = torch.zeros((), dtype=x.dtype), torch.zeros(len(x), dtype=torch.bool)
        for view in (without_low_frequencies(x, mask), with_patch_noise(x, amount, noise)):
            features, _ = features_and_logits(student, view)
            online = head(features @ predictor.T).log_softmax(1)
            chosen = plain.amax(1) > online.detach().amax(1)
            if chosen.any():
                loss = loss + kl(plain, online)[chosen].mean()
            taught |= chosen
        outcome = Outcome(logits.detach(), torch.ones(len(x), dtype=torch.bool))
        if taught.any():
            *gradients, last, climb = torch.autograd.grad(
                loss, [*theta, predictor, amount], allow_unused=True, materialize_grads=True
            )
            step(norms, gradients)
            step(other, [last])
            step(noisy, [-climb])
            with torch.no_grad():
                amount.copy_(rescaled(amount, ratio))
            outcome.updates.append(taught)
        yield outcome
