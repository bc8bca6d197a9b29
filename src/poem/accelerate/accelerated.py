"""All ways to run the engine faster, behind the one interface that the engine knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from poem.accelerate import batch_norm, blended, sample_norms, selected_rows
from poem.accelerate.branch_backward import BranchBackward
from poem.accelerate.lazy_norm import LazyNorms, computed
from poem.accelerate.packed_attention import PackedAttention
from poem.accelerate.prefix_cache import PrefixCache
from poem.accelerate.weight_casts import WeightCasts, channels_last
from poem.engine.acceleration import Acceleration
from poem.engine.loop import BatchLoop
from poem.engine.network import Network
from poem.engine.norm_layers import ForwardContext, PatchedNorm
from poem.engine.parameter_groups import Swap, swapped
from poem.parts.base import Memory, Outputs
from poem.parts.statistics import Statistics


class Accelerated(Acceleration):
    """Caches early layers, casts frozen weights once, fuses norm layers, shortens backward passes.

    Args:
        half: Compute in bfloat16: frozen weights are cast once per batch, images and convolutions are channels last.
    """

    def __init__(self, *, half: bool = False) -> None:
        self._half = half

    def attach(self, network: Network) -> None:
        """Build each of them over the network's twin."""
        adapted = {id(parameter) for group in network.groups for parameter in group.own}
        holders = {module for group in network.groups for places in group.places for module, _ in places}
        self.network = network
        self.weight_casts = WeightCasts(network.modules, adapted, torch.bfloat16) if self._half else None
        self.prefix_cache = PrefixCache(network.modules, holders, network.twin.hooked)
        self.branch_backward = BranchBackward(network.frozen_beyond_split(), network.is_doubled, network.undoubled)
        self.lazy = LazyNorms(network.model) if self._half else None
        self.attention = PackedAttention(network.model) if self._half else None
        self.independent: bool | None = None  # whether samples get the same logits alone; None before it was tried

    def patch(self) -> None:
        """Replace forwards: beyond the split, of norm layers without a branch and of cached layers."""
        self.branch_backward.patch()
        if self._half:
            sample_norms.patch(self.network.modules, self.lazy)
        self.prefix_cache.patch()

    def reset(self) -> None:
        """Try the branch's half, single samples and lazy norm layers again, and find the early layers again."""
        self.independent = self.branch_backward.right = None
        self.model_changed()

    def model_changed(self) -> None:
        """Find the early layers again, try lazy norm layers again, and see again whether there is attention."""
        self.prefix_cache.forget()
        if self.lazy is not None:
            self.lazy.right = None
        if self.attention is not None:
            self.attention.used = None

    def release(self) -> None:
        """Free the cast weights."""
        if self.weight_casts is not None:
            self.weight_casts.forget()

    def refresh(self) -> None:
        """Cast the frozen weights as they are now."""
        self.branch_backward.half_only = False
        if self.weight_casts is not None:
            self.weight_casts.refresh()

    def copy_weights(self) -> None:
        """Cast the frozen weights again, where they were at the last refresh."""
        if self.weight_casts is not None:
            self.weight_casts.copy()

    def hold(self, images: Tensor | None) -> None:
        """Cache outputs of early layers for these images."""
        self.prefix_cache.hold(images)

    def once(self, key: object, images: Tensor, compute: Callable[[], Any]) -> Any:
        """From the cache, where these are the images that are held."""
        return self.prefix_cache.once(key, images, compute)

    @contextmanager
    def forward_pass(self, images: Tensor, *, cacheable: bool) -> Iterator[None]:
        """Inside, early layers answer from the cache, norm layers wait, and attention is handed views of ours."""
        with (
            self.prefix_cache.passing(images, plain=cacheable),
            nullcontext() if self.lazy is None else self.lazy.passing(),
            nullcontext() if self.attention is None else self.attention.passing(),
        ):
            yield

    def untried(self, device: str) -> bool:
        """Whether lazy norm layers are still to be tried on a batch."""
        devices = {*batch_norm.DEVICES, *sample_norms.DEVICES, *blended.DEVICES}
        return self.lazy is not None and device in devices and self.lazy.untried

    def try_once(self, images: Tensor, statistics: Statistics, memory: Memory, *, learns: bool) -> str | None:
        """Lazy norm layers, by a pass with them and one without; with gradients, if the recipe learns."""
        network = self.network
        if self.lazy is None or not self.untried(images.device.type):
            return None

        def answers() -> list[Tensor]:
            leaves = {key: each.detach().requires_grad_(learns) for key, each in network.source().items()}
            theta = leaves["theta"] if leaves["theta"].numel() else None
            with torch.set_grad_enabled(learns):
                # A view, which is not the tensor that results are cached for.
                heads, _ = network.heads(
                    images.view_as(images), theta, leaves.get("branch"), statistics, memory, training=learns
                )
                wanted = [each for each in leaves.values() if learns and each.numel()]
                loss = sum((head.square().sum() for head in heads), heads[0].new_zeros(()))
            found = torch.autograd.grad(loss, wanted, materialize_grads=True) if wanted else ()
            return [*(head.detach() for head in heads), *found]

        return self.lazy.try_once(answers)

    def layout(self, images: Tensor) -> Tensor:
        """Channels last, with cast weights."""
        return images if self.weight_casts is None else channels_last(images)

    @property
    def swaps(self) -> list[Swap]:
        """The cast weights."""
        return [] if self.weight_casts is None else self.weight_casts.swaps

    def batch_norm(self, norm: PatchedNorm, x: Tensor, context: ForwardContext, groups: int) -> Tensor | None:
        """By Triton kernels, where they take the layer."""
        return batch_norm.fused(norm, computed(x), context, groups, self.lazy)

    def given_norm(
        self, norm: PatchedNorm, x: Tensor, moments: tuple[Tensor, Tensor], context: ForwardContext, groups: int
    ) -> Tensor | None:
        """By one Triton kernel in half precision, where it takes the layer."""
        if not self._half:
            return None
        return batch_norm.fused_by(norm, computed(x), moments, context, groups, self.lazy)

    def copies_norm(
        self, norm: PatchedNorm, x: Tensor, context: ForwardContext, key: str
    ) -> tuple[Tensor, Memory] | None:
        """By Triton kernels, where they take the layer and no gradient is wanted."""
        return blended.fused(norm, computed(x), context, key, self.lazy)

    def sample_norm(self, norm: PatchedNorm, x: Tensor, context: ForwardContext, groups: int) -> Tensor | None:
        """By Triton kernels in half precision, where they take the layer."""
        if not self._half:
            return None
        with swapped(context.swaps.get(norm.layer, []) if groups == 2 else []):
            second = sample_norms.affine_of(norm.layer)
        affine = [sample_norms.affine_of(norm.layer), second][:groups]
        return sample_norms.fused(norm.layer, norm.own, computed(x), affine, self.lazy)

    def branch_gradient(self, ask: Callable[[], Tensor], tolerance: float) -> Tensor:
        """Through the branch's half of the doubled batch alone, where that was found right."""
        return self.branch_backward.gradient(ask, tolerance)

    def selected_rows(
        self, loop: BatchLoop, outputs: Outputs, mask: Tensor, weights: Tensor
    ) -> tuple[Outputs, Tensor, Tensor]:
        """On a CPU, the selected rows alone where they are few and samples do not depend on each other."""
        return selected_rows.selected_rows(self, loop, outputs, mask, weights)

    @property
    def key(self) -> object:
        """Half precision rounds differently."""
        return self._half
