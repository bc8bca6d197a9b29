"""The adapted weights as a plain module, for ONNX, torch.export or a checkpoint."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from poem.engine.network import Network, log_odds, two_columns
from poem.engine.parameter_groups import HALF
from poem.engine.state import State
from poem.engine.twin import Translation
from poem.parts.base import Memory, Need, Outputs
from poem.parts.statistics import FromBatch, RunningMean, Source
from poem.recipes.recipe import Recipe


class Exported(nn.Module):
    """Normalisation, one network or two, class mask. Two networks stand whole, side by side: plain beats small."""

    def __init__(self, heads: list[nn.Module], network: Network, recipe: Recipe) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)
        self._branch, self._correct = recipe.branch, recipe.readout.correct
        owns = [dict(zip(network.model.modules(), head.modules(), strict=True)) for head in heads]
        self._logits = [Translation(own)(network.given_logits) for own in owns]
        for name in ("_mean", "_std", "_classes"):
            self.register_buffer(name, getattr(network, name))

    def forward(self, images: Tensor) -> Tensor:
        """What the adapter answers when frozen."""
        mean, std, classes = self._mean, self._std, self._classes
        if isinstance(mean, Tensor) and isinstance(std, Tensor):
            shape = (1, -1, *[1] * (images.dim() - 2))
            images = (images - mean.view(shape)) / std.view(shape)
        images = images.to(next(self.heads.parameters()).dtype)
        logits = [logits_of(head(images.clone())) for head, logits_of in zip(self.heads, self._logits, strict=True)]
        logits = [each.float() if each.dtype in HALF else each for each in logits]
        one_logit = logits[0].shape[1] == 1
        logits = [each[:, classes] if isinstance(classes, Tensor) else two_columns(each) for each in logits]
        answer = logits[0] if self._branch is None else self._branch.together(logits[0], logits[1])
        answer = self._correct(Outputs(answer, tuple(logits)), {})
        return log_odds(answer) if one_logit else answer


def exported(network: Network, recipe: Recipe, state: State) -> nn.Module:
    """Copies of the model with the adapted values written into them, one per head.

    With `RunningMean` the copies normalise with the average so far, without the batch in hand.
    """
    statistics = recipe.statistics
    if not isinstance(statistics, FromBatch | RunningMean | Source):
        raise ValueError(f"{statistics!r} depends on each batch and cannot be exported; use statistics=Source()")
    if Need.FEATURES in recipe.readout.correct.needs:
        raise ValueError(f"{recipe.readout.correct!r} reads features and cannot be exported; use readout=Readout()")
    values = state.teacher if recipe.readout.which == "teacher" else state.moving
    heads = []
    for keys in [("theta",), ("theta", "branch")][: 1 + ("branch" in values)]:
        head = copy.deepcopy(network.model).eval()
        own = dict(head.named_parameters())
        for key in keys:
            group = network.theta if key == "theta" else network.branch
            assert group is not None
            with torch.no_grad():
                for name, value in group.named(values[key]).items():
                    own[name].copy_(value)
        names = [name for name, _ in network.model.named_modules()]
        deep = names[network.split_index :] if "branch" in keys else []
        _settle(head, statistics, state.memory, deep)
        heads.append(head.requires_grad_(False))
    return Exported(heads, network, recipe).eval()


def _settle(head: nn.Module, statistics: FromBatch | RunningMean | Source, memory: Memory, deep: list[str]) -> None:
    """Batch-norm layers that normalise as the recipe does; `deep` are those with statistics of the branch's own."""
    for name, layer in head.named_modules():
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            continue
        if isinstance(statistics, FromBatch):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        elif isinstance(statistics, RunningMean):
            for buffer, moment in ((layer.running_mean, "mean"), (layer.running_var, "var")):
                mine = f"statistics.{name}.{moment}"
                found = memory.get(f"branch.{mine}" if name in deep else mine)
                if buffer is not None and found is not None:
                    buffer.copy_(found)
