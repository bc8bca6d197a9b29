"""Statistics that follow the stream: several choices at once, each as far as the stream supports it.

`Blended` is what `auto` uses on batch norm. The batch runs through the network in several copies, each with statistics
of its own; their predictions are averaged, those that tell the images apart best with most weight.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from poem.parts.base import Memory, Outputs, entropy, masked_mean
from poem.parts.fields import Count, NotNegative, Positive, Range, Share
from poem.parts.runs import HELD_RUNS, RUNS, UNKNOWN_RUNS, moved_runs, shared_runs, start_runs
from poem.parts.statistics import BatchLayer, FromBatch, Statistics

FORGET = 0.1
"""Rate at which the variation between batches is averaged."""
LARGEST_JUMP = 9.0
"""A batch's squared distance from the one before counts as so many times the variation at most."""


@dataclass(frozen=True, repr=False)
class Blended(Statistics):
    """Copies of the batch, each with a mixture of the source's statistics and the stream's; their mean answers.

    `weights` are the stream's shares in each copy's mixture, `rates` say how far a batch of 64 images moves the copy's
    average over the stream: 1 is the batch itself, 0.05 some 20 batches. A smaller batch moves it less. At the start an
    average moves faster, as that of all images so far does when the source's statistics count as `source_images` of
    them. Where `doubts` has a number for a copy, it uses only what differs from the source's statistics by more than so
    many standard errors, and only the excess, so a stream that is like the source gets the source's statistics. The
    errors are those of batch after batch as they come, so they are large where each batch has classes of its own; where
    the same classes stay for many batches, the batches differ little and the errors are too small. A first batch of one
    image, whose error is unknown, is not used by such a copy.

    A copy counts by how well it tells the images apart: `exp(trust * information)`, where information is the entropy of
    its mean prediction less the mean entropy of its predictions, over the last `horizon` images, as a share of the most
    that it can be, the logarithm of the number of classes. A network that is sure of one class has none of it, and
    neither has one that is sure of nothing. The copy that follows the batch most closely is often unsure and right, so
    `bonus` is added to its exponent, as far as that does not exceed the best copy's.

    Where classes come in runs, the statistics of a batch are those of a few classes. `runs` is how much likelier two
    neighbours in the stream agree than samples further apart, by the predictions of the slowest copy and of the middle
    one, whose mixture is nearest to half and half (`shared_runs`): a sudden shift can make the slowest answer one class
    for a while, and classes in runs confuse the copies that follow the batch; the middle copy copes with both. Every
    copy but the slowest and the source's is divided by `exp(caution * (runs - 1.3))` where `runs` is above 1.3.

    Paper: none. The test of significance is that of instance-aware batch norm (Gong et al., NeurIPS 2022) for a batch;
    the mixture's variance is that of two sets together.
    """

    weights: tuple[Share, ...] = (0.0, 0.25, 0.5, 1.0, 1.0)
    rates: tuple[Share, ...] = (1.0, 1.0, 1.0, 1.0, 0.05)
    doubts: tuple[NotNegative, ...] = (0.0, 0.0, 0.0, 0.0, 3.0)
    trust: NotNegative = 10.0
    bonus: NotNegative = 1.0
    caution: NotNegative = 5.0
    horizon: Count = 256
    source_images: Count = 512

    def __post_init__(self) -> None:
        """Refuses copies without a weight, a rate or a doubt."""
        super().__post_init__()
        if not self.weights or not len(self.weights) == len(self.rates) == len(self.doubts):
            counts = f"{len(self.weights)} weights, {len(self.rates)} rates and {len(self.doubts)} doubts"
            raise ValueError(f"Blended: expected as many rates and doubts as weights, one for each copy, got {counts}")

    @property
    def copies(self) -> int:
        """One for each weight."""
        return len(self.weights)

    @property
    def source_copy(self) -> int | None:
        """The first with a weight of 0."""
        return self.weights.index(0.0) if 0.0 in self.weights else None

    def start_layer(self, key: str, layer: BatchLayer) -> Memory:
        """For each copy the source's statistics, no variation, and no batch before."""
        if layer.source_mean is None or layer.source_var is None:
            return {}
        rows = (self.copies, 1)
        mean, var = _precise(layer.source_mean).repeat(rows), _precise(layer.source_var).repeat(rows)
        none = torch.zeros_like(mean)
        held = {"mean": mean, "var": var, "last_mean": mean, "last_var": var, "mean_moves": none, "var_moves": none}
        # Settings are held with the rest so that they are on the layer's device, where a CUDA graph can read them.
        for name, each in (("weights", self.weights), ("rates", self.rates), ("doubts", self.doubts)):
            held[name] = mean.new_tensor(each)[:, None]
        held |= {"share": none[:, :1], "images": none[0, 0]}
        return {f"{key}.{name}": tensor for name, tensor in held.items()}

    def frozen(self, layer: BatchLayer, memory: Memory, key: str) -> tuple[Tensor, Tensor] | None:
        """Those of one copy: the one that counts most of those that do not follow each batch, if there are any.

        One and not all, since a network has one running average for a layer; the copy's own in every layer, since a
        layer's statistics are of what the layers before it made.
        """
        if f"{key}.mean" not in memory or layer.source_mean is None or layer.source_var is None:
            return None
        own, place = (_precise(layer.source_mean), _precise(layer.source_var)), self.frozen_copy(memory)
        mean, var = self._mixtures(own, memory, memory[f"{key}.weights"], key)
        return mean[place], var[place]

    def frozen_copy(self, memory: Memory) -> int:
        """Which copy an export with frozen statistics takes; before the first batch the source's, or the slowest."""
        if "statistics.predicted" not in memory or float(memory["statistics.seen"]) == 0:
            return min(range(self.copies), key=lambda place: (self.weights[place], self.rates[place]))
        predicted, unsure = memory["statistics.predicted"], memory["statistics.entropy"]
        information = _share_of_most(entropy(predicted.clamp(min=1e-12).log()) - unsure, predicted.shape[-1])
        near, far = memory["statistics.near"], memory["statistics.far"]
        runs = shared_runs(torch.where(far > 0, near / far.clamp(min=1e-9), UNKNOWN_RUNS))
        scores = self._preferred(self.trust * information, runs).tolist()
        every = range(self.copies)
        lasting = [place for place in every if self.weights[place] == 0 or self.rates[place] < 1]
        others = lasting or [place for place in every if place != self._closest] or [0]
        return max(others, key=lambda place: (scores[place], -self.rates[place]))

    def _mixtures(self, own: tuple[Tensor, Tensor], new: Memory, weight: Tensor, key: str) -> tuple[Tensor, Tensor]:
        """Each copy's mean and variance (copies, C): the source's, mixed with what is significant of the stream's."""
        mean, var = own
        share, doubts = new[f"{key}.share"], new[f"{key}.doubts"]
        seen = mean + _beyond(new[f"{key}.mean"] - mean, doubts * (new[f"{key}.mean_moves"] * share).sqrt())
        spread = var + _beyond(new[f"{key}.var"] - var, doubts * (new[f"{key}.var_moves"] * share).sqrt())
        mixed = mixture(mean, var, seen, spread, weight)
        # A share of 0 of what is not finite would not be 0, and this copy is the source.
        return torch.where(weight == 0, mean, mixed[0]), torch.where(weight == 0, var, mixed[1])

    def __call__(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Tensor:
        """Each copy with its own statistics."""
        return self._with_memory(layer, x, mask, memory, key)[0]

    def normalised(
        self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str
    ) -> tuple[Tensor, Memory]:
        """Both from the same moments of the batch, unless a subclass has an answer of its own."""
        own = type(self).__call__ is not Blended.__call__
        return (super().normalised if own else self._with_memory)(layer, x, mask, memory, key)

    def _with_memory(
        self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str
    ) -> tuple[Tensor, Memory]:
        """Each copy with its own statistics, and what the layer remembers."""
        new = self.remember_layer(layer, x, mask, memory, key)
        if not new or layer.source_mean is None or layer.source_var is None:
            return FromBatch()(layer, x, mask, memory, key), new
        own, count = (_precise(layer.source_mean), _precise(layer.source_var)), _count(x, mask, self.copies)
        doubts = memory[f"{key}.doubts"]
        unknown = (memory[f"{key}.images"] == 0) & (count < 2) & (doubts > 0)
        weight = torch.where(unknown, 0, memory[f"{key}.weights"])
        return layer.with_moments(x, *self._mixtures(own, new | {f"{key}.doubts": doubts}, weight, key)), new

    def remember_layer(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Memory:
        """Each copy's average moved by the batch, and how much batches differ from each other."""
        if f"{key}.mean" not in memory:
            return {}
        held = {name: memory[f"{key}.{name}"] for name in ("mean", "var", "last_mean", "last_var", "images")}
        mean, var, mean_error, var_error = _described(x.detach(), mask, self.copies)
        count = _count(x, mask, self.copies)
        rate = self._rate(memory[f"{key}.rates"], count, held["images"])
        moved = mixture(held["mean"], held["var"], mean, var, rate)
        new = dict(zip(("mean", "var"), moved, strict=True))
        # The variance of the average, as a share of a batch's.
        new["share"] = (1 - rate).square() * memory[f"{key}.share"] + rate.square()
        for name, now, error in (("mean", mean, mean_error), ("var", var, var_error)):
            first = held["images"] == 0
            between = torch.where(first, error, memory[f"{key}.{name}_moves"])
            floor = torch.maximum(between, error)
            jump = (now - held[f"last_{name}"]).square() / 2
            # Images that come one by one have no spread: the first jump is then all that is known.
            known = between + FORGET * (torch.minimum(jump, LARGEST_JUMP * floor) - between)
            between = torch.where(first, between, torch.where(floor > 0, known, jump))
            new |= {f"last_{name}": now, f"{name}_moves": torch.maximum(between, error)}
        new["images"] = held["images"] + count
        if mask is not None:  # that keeps none
            new = {name: torch.where(count > 0, tensor, memory[f"{key}.{name}"]) for name, tensor in new.items()}
        return {f"{key}.{name}": tensor for name, tensor in new.items()}

    def _rate(self, rates: Tensor, count: Tensor, images: Tensor) -> Tensor:
        """How far so many images move each copy's average (copies, 1) after the images before."""
        return torch.maximum((rates * count / 64).clamp(max=1), count / (self.source_images + images + count))

    def start(self, outputs: Outputs) -> Memory:
        """No predictions seen."""
        zeros = outputs.probs.new_zeros(self.copies, outputs.classes)
        sums = {"predicted": zeros, "entropy": zeros[:, 0], "seen": zeros[0, 0]}
        return sums | start_runs(outputs.probs.new_zeros(2, 1, outputs.classes))

    def combine(self, logits: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """The copies' probabilities (copies, B, C) averaged by their information, as logarithms (B, C)."""
        each = logits.log_softmax(-1)
        known, count = each.detach(), each.shape[1]
        empty = known.new_zeros(())
        seen = memory.get("statistics.seen", empty)
        share = torch.maximum(count / (seen + count), empty + min(1.0, count / self.horizon))
        probs = known.exp()
        mean, sure = probs.mean(1), entropy(known).mean(1)
        predicted = torch.lerp(memory.get("statistics.predicted", mean), mean, share)
        unsure = torch.lerp(memory.get("statistics.entropy", sure), sure, share)
        information = _share_of_most(entropy(predicted.clamp(min=1e-12).log()) - unsure, known.shape[-1])
        watched = torch.stack([probs[self._slowest], probs[self._middle]])
        begun = "statistics.recent" in memory
        held = {name: memory[f"statistics.{name}"] for name in HELD_RUNS} if begun else start_runs(watched)
        runs, record = moved_runs(held, watched, seen)
        weights = self._preferred(self.trust * information, shared_runs(runs)).log_softmax(0)
        record |= {"predicted": predicted, "entropy": unsure, "seen": seen + count}
        answer = (each + weights[:, None, None]).logsumexp(0)
        return answer, {f"statistics.{name}": value for name, value in record.items()}

    @property
    def _slowest(self) -> int:
        """The copy whose average over the stream is the longest."""
        moving = [place for place, weight in enumerate(self.weights) if weight > 0] or [0]
        return min(moving, key=lambda place: self.rates[place])

    @property
    def _middle(self) -> int:
        """The copy that follows the batch about half; the slowest where none follows it."""
        slowest = self._slowest
        moving = [place for place, weight in enumerate(self.weights) if weight > 0]
        quick = [place for place in moving if self.rates[place] > self.rates[slowest]] or [slowest]
        return min(quick, key=lambda place: abs(self.weights[place] - 0.5))

    @property
    def _closest(self) -> int:
        """The copy that follows the batch most closely."""
        return max(range(self.copies), key=lambda place: (self.weights[place] * self.rates[place], place))

    def _preferred(self, scores: Tensor, runs: Tensor) -> Tensor:
        """Each copy's score: more for the closest to the batch, less for all quick ones where classes run."""
        closest = self._closest
        slowest = self.rates[self._slowest]
        least = self.caution * (runs - RUNS).clamp(min=0)
        found = []
        for place, (weight, rate) in enumerate(zip(self.weights, self.rates, strict=True)):
            score = torch.minimum(scores[place] + self.bonus, scores.max()) if place == closest else scores[place]
            found.append(score - least if weight > 0 and rate > slowest else score)
        return torch.stack(found)


@dataclass(frozen=True, repr=False)
class Significant(Statistics):
    """The batch's statistics where they differ from the source's by more than `doubt` standard errors, by the excess.

    The error of a channel's mean and variance is that of an average over the batch's images. A batch that is like the
    source is normalised exactly as by the source; a single image, whose error is unknown, always is.

    Paper: the shrinkage of instance-aware batch norm (NOTE, Gong et al., NeurIPS 2022), for a batch.
    Reference code: TaesikGong/NOTE (MIT).
    Differs: a batch in the place of each instance, with the spread between its images as the error; the network was not
    trained with it.
    """

    doubt: NotNegative = 3.0

    def __call__(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Tensor:
        """Source statistics, moved by what is significant."""
        if layer.source_mean is None or layer.source_var is None:
            return FromBatch()(layer, x, mask, memory, key)
        mean, var, mean_error, var_error = (each[0] for each in _described(x.detach(), mask, 1))
        alone = _count(x, mask, 1) < 2
        seen = layer.source_mean + _beyond(mean - layer.source_mean, self.doubt * mean_error.sqrt())
        spread = layer.source_var + _beyond(var - layer.source_var, self.doubt * var_error.sqrt())
        return layer.with_moments(
            x, torch.where(alone, layer.source_mean, seen), torch.where(alone, layer.source_var, spread)
        )


@dataclass(frozen=True, repr=False)
class Components(Statistics):
    """Each image is normalised by a mixture of components to which its own statistics belong more or less.

    The components start scattered about the source's statistics and follow the stream. No image depends on others of
    its batch, so batches of one image and streams sorted by class are fine.

    Paper: Tomar et al., "Un-Mixing Test-Time Normalization Statistics", ICLR 2024.
    Reference code: devavratTomar/unmixtns.
    Differs: the components start from a generator keyed by the layer's name.
    """

    count: Annotated[int, Range(at_least=2)] = 16
    temperature: Positive = 0.07
    momentum: Share = 0.1

    def start_layer(self, key: str, layer: BatchLayer) -> Memory:
        """Components about the source's statistics: together they have its mean and variance, nearly."""
        if layer.source_mean is None or layer.source_var is None:
            return {}
        mean, var = _precise(layer.source_mean), _precise(layer.source_var)
        rng = torch.Generator().manual_seed(zlib.crc32(key.removeprefix("branch.").encode()))
        draws = torch.randn(self.count, len(mean), generator=rng).to(mean)
        apart = math.sqrt(0.5 * self.count / (self.count - 1)) * var.sqrt() * draws
        return {f"{key}.mean": mean + apart, f"{key}.var": (0.5 * var).repeat(self.count, 1)}

    def frozen(self, layer: BatchLayer, memory: Memory, key: str) -> tuple[Tensor, Tensor] | None:
        """Mean and variance of all components together."""
        if f"{key}.mean" not in memory:
            return None
        means, spreads = memory[f"{key}.mean"], memory[f"{key}.var"]
        return means.mean(0), spreads.mean(0) + means.var(0, correction=0)

    def __call__(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Tensor:
        """Every image with its own mean and variance."""
        if f"{key}.mean" not in memory:
            return FromBatch()(layer, x, mask, memory, key)
        mean, var, share = self._images(x.detach(), memory, key)
        means = torch.lerp(memory[f"{key}.mean"][None], mean[:, None], share[:, :, None])  # (B, components, C)
        spreads = torch.lerp(memory[f"{key}.var"][None], var[:, None], share[:, :, None])
        middle = means.mean(1)
        return layer.with_moments(x, middle, spreads.mean(1) + (means - middle[:, None]).square().mean(1))

    def remember_layer(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Memory:
        """The components moved towards the images that belong to them; a variance that overflows moves nothing."""
        if f"{key}.mean" not in memory:
            return {}
        mean, var, share = self._images(x.detach(), memory, key)
        rate = 1 - (1 - self.momentum) ** (_count(x, mask, 1) / 64)
        new = {}
        for name, now in (("mean", mean), ("var", var)):
            old = memory[f"{key}.{name}"]
            moves = share[:, :, None] * (now[:, None] - old)
            moves = torch.where(moves.isfinite(), moves, 0)  # an answer can be finite after a division by infinity
            new[f"{key}.{name}"] = old + rate * (moves.mean(0) if mask is None else masked_mean(moves, mask))
        return new

    def _images(self, x: Tensor, memory: Memory, key: str) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance of each image (B, C), and how much it belongs to each component (B, components)."""
        values = _precise(x)
        flat = values.flatten(2) if x.dim() > 2 else values[:, :, None]
        mean, var = flat.mean(2), flat.var(2, correction=0)
        cosine = F.cosine_similarity(mean[:, None], memory[f"{key}.mean"][None], dim=2)
        return mean, var, (cosine / self.temperature).softmax(1)


def mixture(
    mean: Tensor, var: Tensor, other_mean: Tensor, other_var: Tensor, weight: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Mean and variance of two sets of samples together, the other one with this weight."""
    apart = other_mean - mean
    spread = weight * (1 - weight) * apart.square()
    return mean + weight * apart, var + weight * (other_var - var) + spread


def _share_of_most(information: Tensor, classes: int) -> Tensor:
    """Information as a share of the most that so many classes can carry."""
    return information / math.log(max(2, classes))


def _beyond(difference: Tensor, error: Tensor) -> Tensor:
    """The part of a difference that exceeds the error."""
    return difference.sign() * (difference.abs() - error).clamp(min=0)


def _precise(x: Tensor) -> Tensor:
    """In single precision at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _count(x: Tensor, mask: Tensor | None, copies: int) -> Tensor:
    """How many images the statistics are of; on the device, so that a masked pass need not wait for the number."""
    kind = torch.promote_types(x.dtype, torch.float32)
    return x.new_full((), x.shape[0] // copies, dtype=kind) if mask is None else mask.sum(dtype=kind)


def _described(x: Tensor, mask: Tensor | None, copies: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each copy's mean and variance (copies, C), and the squared standard error of each from the spread over images.

    One image has no spread: its errors are 0.
    """
    values = _precise(x)
    flat = values.unflatten(0, (copies, -1)).flatten(3) if x.dim() > 2 else values.unflatten(0, (copies, -1))[..., None]
    means, squares = flat.mean(3), flat.square().mean(3)  # (copies, B, C), of each image

    def over(images: Tensor) -> Tensor:
        if mask is None:
            return images.mean(1)
        return torch.where(mask[:, None], images, 0).sum(1) / mask.sum().clamp(min=1)

    mean = over(means)
    spreads = (squares - 2 * mean[:, None] * means + mean[:, None].square()).clamp(min=0)  # about the batch's mean
    var = over(spreads)
    below = (_count(x, mask, copies) - 1).clamp(min=1)
    mean_error = over((means - mean[:, None]).square()) / below
    return mean, var, mean_error, over((spreads - var[:, None]).square()) / below
