"""The learning rate by network family and batch size, where a recipe gives no number."""

from __future__ import annotations

from dataclasses import dataclass

from poem.parts.fields import Checked, NotNegative


@dataclass(frozen=True)
class Rule(Checked):
    """The learning rate by network family and batch size, as the code of SAR, DeYO and POEM sets it for all methods.

    Convolutional: 0.00025 from 32 images on, below that 0.0005 / 64 per image. Transformer: 0.001 / 64 per image.
    `double_one` doubles it for streams of single images (SAR, DeYO, POEM and what is built on them).
    """

    double_one: bool = False
    convolutional: NotNegative = 0.00025
    transformer: NotNegative = 0.001

    def __str__(self) -> str:
        twice = "; twice that rule's for single images" if self.double_one else ""
        rates = f"{self.convolutional:g} (convolutional) or {self.transformer:g} (transformer) at batch 64"
        return f"{rates}, less for smaller batches{twice}"

    def __call__(self, family: str, batch_size: int) -> float:
        """The learning rate."""
        if family == "transformer":
            rate = self.transformer / 64 * batch_size
        else:
            rate = self.convolutional if batch_size >= 32 else self.convolutional / 64 * batch_size * 2
        return 2 * rate if self.double_one and batch_size == 1 else rate


@dataclass(frozen=True)
class FamilyRate(Rule):
    """The learning rate by network family alone, whatever the batch size; `double_one` doubles it for single images."""

    def __str__(self) -> str:
        twice = ", twice that for single images" if self.double_one else ""
        return f"{self.convolutional:g} (convolutional) or {self.transformer:g} (transformer){twice}"

    def __call__(self, family: str, batch_size: int) -> float:
        """The learning rate."""
        rate = self.transformer if family == "transformer" else self.convolutional
        return 2 * rate if self.double_one and batch_size == 1 else rate
