"""What the engine asks of `accelerate/`. This class answers each question as if there were nothing faster.

The engine runs without any acceleration; `accelerate/accelerated.py` is the implementation that adapters use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from poem.engine.parameter_groups import Swap

if TYPE_CHECKING:
    from poem.engine.loop import BatchLoop
    from poem.engine.network import Network
    from poem.engine.norm_layers import ForwardContext, PatchedNorm
    from poem.parts.base import Memory, Outputs
    from poem.parts.statistics import Statistics


class Acceleration:
    """The plain engine: nothing is cached, cast, fused or left out."""

    def attach(self, network: Network) -> None:
        """Called once, when the network's twin and groups are there."""

    def patch(self) -> None:
        """Replace forwards on the twin; called whenever it has been rebuilt."""

    def reset(self) -> None:
        """Forget what was found out about the model on a batch."""

    def model_changed(self) -> None:
        """The user changed the model: which layers run early may be another question now."""

    def release(self) -> None:
        """Free the memory of cast weights."""

    def refresh(self) -> None:
        """Called before each batch that runs eagerly or is captured: the model's weights may have been written to."""

    def copy_weights(self) -> None:
        """The first operations of a captured batch, so that every replay sees the model's weights as they are then."""

    def hold(self, images: Tensor | None) -> None:
        """Results that depend on these images alone may be cached from now on; None drops them."""

    def once(self, key: object, images: Tensor, compute: Callable[[], Any]) -> Any:
        """What is computed from the images alone, cached for the images that are held."""
        return compute()

    def forward_pass(self, images: Tensor, *, cacheable: bool) -> AbstractContextManager[None]:
        """A context around one call of the model; `cacheable` if layers depend on their input and tensors alone."""
        return nullcontext()

    def try_once(self, images: Tensor, statistics: Statistics, memory: Memory, *, learns: bool) -> str | None:
        """Before a batch that runs eagerly: try what is to be tried on a model's first batch.

        Returns:
            What to note: a faster way that this model does not allow. None where there is nothing to say.
        """
        return None

    def layout(self, images: Tensor) -> Tensor:
        """The model's input in the memory layout that it computes fastest in."""
        return images

    @property
    def swaps(self) -> list[Swap]:
        """Frozen weights to put in place for a pass, beside the adapted ones."""
        return []

    def batch_norm(self, norm: PatchedNorm, x: Tensor, context: ForwardContext, groups: int) -> Tensor | None:
        """The layer's output with the batch's statistics, each of `groups` of rows apart; None to run the layer."""
        return None

    def copies_norm(
        self, norm: PatchedNorm, x: Tensor, context: ForwardContext, key: str
    ) -> tuple[Tensor, Memory] | None:
        """A batch norm's output with the statistics of a part that runs the batch in copies, and its new memory.

        `x` holds all copies; the layer's memory is under `key`. None to ask the part.
        """
        return None

    def given_norm(
        self, norm: PatchedNorm, x: Tensor, moments: tuple[Tensor, Tensor], context: ForwardContext, groups: int
    ) -> Tensor | None:
        """A batch norm's output with this mean and variance (C,); each of `groups` of rows has tensors of its own.

        None to run the layer.
        """
        return None

    def sample_norm(self, norm: PatchedNorm, x: Tensor, context: ForwardContext, groups: int) -> Tensor | None:
        """The output of a layer that normalises each sample alone; each of `groups` of rows has tensors of its own."""
        return None

    def branch_gradient(self, ask: Callable[[], Tensor], tolerance: float) -> Tensor:
        """The gradient of the branch's own loss, which `ask` computes."""
        return ask()

    def selected_rows(
        self, loop: BatchLoop, outputs: Outputs, mask: Tensor, weights: Tensor
    ) -> tuple[Outputs, Tensor, Tensor]:
        """Outputs, mask and weights that the loss is computed from: the batch whole, or its selected rows."""
        return outputs, mask, weights

    @property
    def key(self) -> object:
        """What results may depend on: two accelerations with the same key compute the same numbers."""
        return None
