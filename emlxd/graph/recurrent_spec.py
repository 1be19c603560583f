"""Layers that go through a text token by token and carry a state of fixed size, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CHUNK: Final = 64  # tokens of a recurrence that are computed at once


@dataclass(frozen=True, slots=True)
class Kept:
    """An array that a layer keeps, a row a slot; ``shape`` is that of one slot.

    With ``by_token`` its second axis counts positions: keys, values, latents. Otherwise it is a state, which
    stands for all tokens so far. ``exact`` is float32 whatever the model computes in. ``ring`` as in
    ``LayerSpec``.
    """

    shape: tuple[int, ...]
    by_token: bool = True
    exact: bool = False
    ring: int | None = None


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


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """A gated delta net (Qwen 3 Next) behind a convolution over ``width`` tokens.

    Neighbouring value heads share a key head. ``grouped``: the input projections are stored key head by key
    head, as two matrices, and not as one matrix for each of what they make.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    grouped: bool

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def states(self) -> tuple[Kept, ...]:
        state = Kept((self.value_heads, self.value_dim, self.key_dim), by_token=False, exact=True)
        return conv_state(2 * self.keys + self.values, self.width), state

    @property
    def widest_row(self) -> int:
        return 2 * (2 * self.keys + self.values) + self.value_heads * (2 * self.key_dim + 2 * CHUNK)


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """A Mamba-2 state space behind a convolution over ``width`` tokens.

    ``groups`` of neighbouring heads share what writes to the state and what reads from it. A step takes time
    within ``step_limits``.
    """

    heads: int
    head_dim: int
    state_dim: int
    groups: int
    width: int
    conv_bias: bool
    bias: bool
    step_limits: tuple[float, float]

    @property
    def values(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: values, what writes, what reads."""
        return self.values + 2 * self.groups * self.state_dim

    @property
    def states(self) -> tuple[Kept, ...]:
        state = Kept((self.heads, self.head_dim, self.state_dim), by_token=False, exact=True)
        return conv_state(self.channels, self.width), state

    @property
    def widest_row(self) -> int:
        return 2 * self.channels + self.heads * (2 * self.state_dim + 2 * CHUNK)


RecurrentSpec = ShortConvSpec | DeltaNetSpec | MambaSpec


def conv_state(channels: int, width: int) -> Kept:
    """The inputs that a convolution will look back at."""
    return Kept((width - 1, channels), by_token=False)
