"""Damaged views of an image that keep its geometry, and learning from the intact image what they show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from poem.parts.base import Memory, Need, Outputs, Part, Selected
from poem.parts.fields import Count, NotNegative, Positive, Share
from poem.parts.objective import Objective


@dataclass(frozen=True, repr=False)
class LowFrequencies(Part):
    """Drops low frequencies of each image: amplitudes in a square around the constant one, each by chance.

    `convolutional` and `transformer` are the chances by network family; `square` is the square's side as a share of
    the image's. Phases stay, and the mask is symmetric, so that the image stays real.

    Paper: SPA (ICML 2025).
    Differs: the square follows the image's size (the code has 224 pixels).
    """

    convolutional: Share = 0.1
    transformer: Share = 0.2
    square: Share = 0.2

    @property
    def needs(self) -> frozenset[Need]:
        """Images with height and width."""
        return frozenset({Need.PICTURES})

    def __call__(self, outputs: Outputs) -> Tensor:
        """Damaged images; what is dropped is drawn once per batch."""
        x = _as_the_network_sees(outputs)
        chance = self.transformer if outputs.family == "transformer" else self.convolutional
        mask = outputs.batch.once(self, lambda rng: self._mask(x.shape, chance, rng)).to(x.dtype)
        kept = torch.fft.fft2(x) * torch.fft.ifftshift(mask, dim=(2, 3))
        return _as_given(torch.fft.ifft2(kept).real, outputs)

    def _mask(self, shape: torch.Size, chance: float, rng: torch.Generator) -> Tensor:
        """Ones and zeros (B, C, H, W), the constant frequency in the middle; one half is drawn and mirrored."""
        count, channels, *sides = shape
        wide = [int(side * self.square) for side in sides]
        begin = [side // 2 - each // 2 for side, each in zip(sides, wide, strict=True)]
        mask = torch.ones(shape)
        drawn = (torch.rand(count, channels, *wide, generator=rng) >= chance).float()
        mask[:, :, begin[0] : begin[0] + wide[0], begin[1] : begin[1] + wide[1]] = drawn
        # An even side has one frequency, the first, without a mirror image; none is dropped there.
        inner = mask[:, :, 1 - sides[0] % 2 :, 1 - sides[1] % 2 :]
        row, column = inner.shape[2] // 2, inner.shape[3] // 2
        inner[:, :, row + 1 :] = 1
        inner[:, :, row, :column] = 1
        inner *= inner.flip((2, 3))
        return mask


@dataclass(frozen=True, repr=False)
class PatchNoise(Part):
    """Mixes noise into each patch of an image, by a trained amount: `(1 - a^2) x + a^2 v`, cut at `clip`.

    The amounts `a`, one per patch of `patch` pixels, are trained to raise the loss, at the rate 1 where the recipe's is
    the published one, and scaled after each step, so that the mean of `a^2` is `convolutional` or `transformer`. The
    noise of a patch's pixels is drawn once and the same for all patches and images.

    Paper: SPA (ICML 2025).
    Differs: amounts start at the scale that they are kept at (the code: at 0.4 for every network).
    """

    patch: Count = 16
    convolutional: Share = 0.1
    transformer: Share = 0.4
    clip: Positive | None = 1.0

    @property
    def needs(self) -> frozenset[Need]:
        """Images with height and width."""
        return frozenset({Need.PICTURES})

    def trainable(self, outputs: Outputs) -> Memory:
        """One amount per patch."""
        images = outputs.batch.images
        if images.dim() != 4 or images.shape[2] % self.patch or images.shape[3] % self.patch:
            raise ValueError(
                f"PatchNoise({self.patch}) needs images whose sides are multiples of {self.patch}, got "
                f"{tuple(images.shape[1:])}; pass another size, as in SelfBootstrap(noise=PatchNoise(8))"
            )
        sides = [side // self.patch for side in images.shape[2:]]
        return {"amount": outputs.logits.detach().new_full(sides, self._share(outputs.family) ** 0.5)}

    def lr_factor(self, family: str) -> float:
        """A rate of 1 at the published rates of the norm layers, 0.01 and 0.0025."""
        return 100.0 if family == "transformer" else 400.0

    def constrain(self, name: str, tensor: Tensor, family: str) -> Tensor:
        """The mean square as it should be, then no amount beyond 1."""
        square = tensor.square().mean().clamp(min=torch.finfo(tensor.dtype).tiny)
        return (tensor * (self._share(family) / square).sqrt()).clamp(-1, 1)

    def __call__(self, outputs: Outputs, amount: Tensor) -> Tensor:
        """Noisy images; the amounts' gradient is turned round."""
        x, side = _as_the_network_sees(outputs), self.patch
        amount = (2 * amount.detach() - amount).to(x.dtype)  # the same value; a step down the gradient climbs
        share = amount.square().repeat_interleave(side, 0).repeat_interleave(side, 1)
        noise = outputs.batch.once(self, lambda rng: torch.randn(x.shape[1], side, side, generator=rng)).to(x.dtype)
        noisy = torch.lerp(x, noise.repeat(1, x.shape[2] // side, x.shape[3] // side), share)
        return _as_given(noisy if self.clip is None else noisy.clamp(-self.clip, self.clip), outputs)

    def _share(self, family: str) -> float:
        """The mean of the squared amounts."""
        return self.transformer if family == "transformer" else self.convolutional


@dataclass(frozen=True, repr=False)
class SelfBootstrap(Objective):
    """Makes damaged views say what the intact image says, where the damage made the prediction less sure.

    For each of two views: over the samples whose confidence fell, the mean `KL(p(x), p(view))`; `p(x)` is a constant.
    The views' features pass a trained matrix (the identity at first) before the last layer, which the answer does not.
    Its rate is `convolutional` or `transformer` times the recipe's.

    Paper: SPA (ICML 2025).
    Reference code: mr-eggplant/SPA (NTUITIVE licence, not for commercial use; not copied).
    Differs: where no sample's confidence fell in either view, no step is made (the code steps by its momentum).
    """

    convolutional: NotNegative = 10.0
    transformer: NotNegative = 5.0
    frequencies: LowFrequencies = field(default_factory=LowFrequencies)
    noise: PatchNoise = field(default_factory=PatchNoise)

    @property
    def needs(self) -> frozenset[Need]:
        """Features for the predictor."""
        return frozenset({Need.FEATURES})

    @property
    def further_passes(self) -> Mapping[object, tuple[int, int]]:
        """Both views, forward and backward."""
        return {self: (2, 2)}

    def trainable(self, outputs: Outputs) -> Memory:
        """The predictor, an identity."""
        if outputs.features is None:
            raise ValueError("SelfBootstrap() needs a model whose last layer is linear; none was found")
        size = outputs.features.shape[1]
        return {"predictor": torch.eye(size, dtype=outputs.logits.dtype, device=outputs.logits.device)}

    def lr_factor(self, family: str) -> float:
        """By network family."""
        return self.transformer if family == "transformer" else self.convolutional

    def __call__(self, selected: Selected) -> Tensor:
        """The sum of both views' means, each over its own samples."""
        plain = selected.outputs.heads[0].detach().log_softmax(1)
        losses = selected.weights.new_zeros(())
        for view in self._views(selected):
            gap = (plain.exp() * (plain - view)).sum(1)
            losses = losses + replace(selected, mask=selected.mask & _less_sure(plain, view)).mean(gap)
        return losses

    def taught(self, selected: Selected) -> Tensor:
        """The samples whose confidence fell in either view."""
        plain = selected.outputs.heads[0].detach().log_softmax(1)
        fell = [_less_sure(plain, view) for view in self._views(selected)]
        return selected.mask & torch.stack(fell).any(0)

    def _views(self, selected: Selected) -> list[Tensor]:
        """Log-probabilities (B, C) of each view behind the predictor; computed once per pass."""
        outputs, predictor = selected.outputs, selected.trained["predictor"]
        keys = [(self, "frequencies"), (self, "noise")]
        if keys[0] not in outputs.cache:
            views = self.frequencies(outputs), self.noise(outputs, selected.trained["noise.amount"])
            for key, view in zip(keys, views, strict=True):
                features = outputs.forward(view, among=selected.mask, grad=True, features=True)
                online = outputs.classify(features.to(predictor.dtype) @ predictor.T)
                outputs.cache[key] = online.log_softmax(1)
        return [outputs.cache[key] for key in keys]


def _less_sure(plain: Tensor, view: Tensor) -> Tensor:
    """Samples whose confidence is lower in the view (B,)."""
    return plain.amax(1) > view.detach().amax(1)


def _as_the_network_sees(outputs: Outputs) -> Tensor:
    """The batch's images after the normalisation inside the network, in at least single precision."""
    images = outputs.batch.images
    images = images if images.dtype in (torch.float32, torch.float64) else images.float()
    return images if outputs.scale is None else (images - outputs.scale[0]) / outputs.scale[1]


def _as_given(images: Tensor, outputs: Outputs) -> Tensor:
    """What the network is called with, so that it sees these images."""
    return images if outputs.scale is None else images * outputs.scale[1] + outputs.scale[0]
