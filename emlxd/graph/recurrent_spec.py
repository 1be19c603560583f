"""Layers that go through a text token by token and carry a state of fixed size, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kept:
    """An array that a layer keeps, a row a slot; ``shape`` is that of one slot.

    With ``by_token`` its second axis counts positions: keys, values, latents. Otherwise it is a state, which
    stands for all tokens so far. ``exact`` is float32 whatever the model computes in.
    """

    shape: tuple[int, ...]
    by_token: bool = True
    exact: bool = False


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A convolution over the last ``width`` tokens, between two gates (LFM2)."""

    channels: int
    width: int
    bias: bool

    @property
    def states(self) -> tuple[Kept, ...]:
        return (conv_state(self.channels, self.width),)

    @property
    def widest_row(self) -> int:
        """Values for a token where there are most of them."""
        return 4 * self.channels


RecurrentSpec = ShortConvSpec


def conv_state(channels: int, width: int) -> Kept:
    """The inputs that a convolution will look back at."""
    return Kept((width - 1, channels), by_token=False)
