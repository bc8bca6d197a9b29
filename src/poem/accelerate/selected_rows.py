"""The backward pass over the selected rows alone, on a CPU.

Precondition: few rows are selected, the loss is a sum over samples, and no sample's logits depend on another (no batch
statistics; tried once by comparing logits). Effect: one more forward and the backward pass for these rows instead of
the backward pass for all. Fallback: the batch whole. Not on a GPU, where a captured loop keeps the batch whole and the
eager loop must agree with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from poem.engine.loop import BatchLoop
from poem.engine.network import Network
from poem.parts.base import Outputs
from poem.parts.statistics import Source, Statistics

if TYPE_CHECKING:
    from poem.accelerate.accelerated import Accelerated

BACKWARD_RATIO = 2.5
"""The backward pass of a batch costs as much as forward and backward of one row in so many; inf switches this off."""


def selected_rows(
    accelerated: Accelerated, loop: BatchLoop, outputs: Outputs, mask: Tensor, weights: Tensor
) -> tuple[Outputs, Tensor, Tensor]:
    """Outputs, mask and weights of the selected rows, or of all."""
    whole = outputs, mask, weights
    images, count = loop.batch.images, loop.rows_read
    if not count or count * BACKWARD_RATIO > len(images) or images.is_cuda or outputs.images is not images:
        return whole
    if not loop.recipe.per_sample or accelerated.independent is False:
        return whole
    if loop.network.given is not None:  # arguments beside the batch would need the same rows
        return whole
    if mixes_samples(loop.network, loop.recipe.statistics):
        return whole
    rows = mask.long().argsort(descending=True, stable=True)[:count]
    alone = loop.forward(images[rows], round=outputs.round, theta=outputs.theta, needed=torch.zeros_like(rows[0]))
    if accelerated.independent is None:
        error = (alone.logits - outputs.logits[rows]).detach().abs().max()
        accelerated.independent = bool(error <= 1e-3 * (1 + outputs.logits.detach().abs().max()))
    return (alone, mask[rows], weights[rows]) if accelerated.independent else whole


def mixes_samples(network: Network, statistics: Statistics) -> bool:
    """Whether a batch-norm layer normalises with statistics of the batch."""
    layers = [norm for norm in network.norms if norm.batch]
    return any(norm.source_mean is None for norm in layers) if isinstance(statistics, Source) else bool(layers)
