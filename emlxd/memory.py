"""How many bytes a model will take, what may be taken in all, and who has to go: arithmetic alone.

The activations are what one prefill chunk or one decode step needs at its worst. Their factors are
measured (docs/memory.md says where); weights and caches are exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from emlxd.graph.measure import ModelFacts, StoredTensor

FLOAT32: Final = 4  # bytes
SCORE_COPIES: Final = 7  # score matrices alive at once where attention is made of plain operations
TOKEN_COPIES: Final = 4  # widest rows of a layer alive at once for each token of a chunk
LAYERS_AHEAD: Final = 2  # layers whose matrices are expanded at once
LOGIT_COPIES: Final = 8  # rows of logits alive at once for each while it samples


@dataclass(frozen=True, slots=True)
class ComputeForm:
    """How a device holds and computes a model: bytes a value, and whether attention is one kernel.

    ``decodes_fused``: a decode step of some models is one kernel, with a copy of 4-bit weights' scales.
    ``expands``: products with many rows expand quantised matrices.
    """

    itemsize: int
    keeps_quantized: bool
    fused_attention: bool
    decodes_fused: bool = False
    expands: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the configuration asks of a model. ``prefix_cache`` is in bytes, the others count.

    ``step_tokens`` is the most that one step computes for a row, ``logit_rows`` how many tokens at most it
    has the logits of at once.
    """

    slots: int
    max_context: int
    prefill_chunk: int
    step_tokens: int
    logit_rows: int
    prefix_cache: int = 0


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of a loaded model, by what they are for."""

    weights: int = 0
    cache: int = 0
    prefix_cache: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.prefix_cache + self.activations


class Candidate(Protocol):
    """A loaded model that may be unloaded for another one. ``last_used`` is a time."""

    @property
    def nbytes(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def last_used(self) -> float: ...


C = TypeVar("C", bound=Candidate)


def needs(facts: ModelFacts, sizes: Sizes, form: ComputeForm) -> Needs:
    """The bytes of a model before it is loaded."""
    weights = sum(_tensor_bytes(tensor, form) for tensor in facts.tensors)
    if facts.decodes_fused and form.decodes_fused:
        weights += sum(_scale_bytes(tensor, form) for tensor in facts.tensors)
    return Needs(
        weights=weights,
        cache=sizes.slots * _slot_bytes(facts, sizes, form),
        prefix_cache=sizes.prefix_cache,
        activations=(
            max(_prefill_bytes(facts, sizes, form), _decode_bytes(facts, sizes))
            + sizes.slots * _state_bytes(facts, form)  # a step reads states and writes others
        ),
    )


def pooling_needs(facts: ModelFacts, tokens: int, max_context: int, form: ComputeForm) -> Needs:
    """The bytes of a pooling model: it reads whole texts, ``tokens`` in a step, and keeps nothing of them."""
    values = TOKEN_COPIES * tokens * facts.widest_row + facts.kept_values(tokens, tokens)
    if not form.fused_attention:
        values += SCORE_COPIES * facts.heads * tokens * max_context
    return Needs(
        weights=sum(_tensor_bytes(tensor, form) for tensor in facts.tensors),
        activations=values * form.itemsize,
    )


def _slot_bytes(facts: ModelFacts, sizes: Sizes, form: ComputeForm) -> int:
    values = facts.kept_values(sizes.max_context, sizes.step_tokens)
    return values * form.itemsize + _state_bytes(facts, form)


def _state_bytes(facts: ModelFacts, form: ComputeForm) -> int:
    return facts.state_values * form.itemsize + facts.exact_values * FLOAT32


def _tensor_bytes(tensor: StoredTensor, form: ComputeForm) -> int:
    if tensor.packed and form.keeps_quantized:
        return tensor.packed + tensor.scales * form.itemsize
    return tensor.values * form.itemsize


def _scale_bytes(tensor: StoredTensor, form: ComputeForm) -> int:
    """Of the decode kernel's copy."""
    return tensor.scales * form.itemsize if form.keeps_quantized and 2 * tensor.packed == tensor.values else 0


def _prefill_bytes(facts: ModelFacts, sizes: Sizes, form: ComputeForm) -> int:
    chunk = min(sizes.prefill_chunk, sizes.max_context)
    rows = TOKEN_COPIES * chunk * facts.widest_row * form.itemsize
    if form.expands and form.keeps_quantized:
        rows += LAYERS_AHEAD * facts.packed_values * form.itemsize
    if form.fused_attention:
        return rows
    return max(rows, SCORE_COPIES * facts.heads * chunk * sizes.max_context * form.itemsize)


def _decode_bytes(facts: ModelFacts, sizes: Sizes) -> int:
    return LOGIT_COPIES * sizes.logit_rows * facts.vocab_size * FLOAT32


def budget_bytes(setting: float, device_total: int) -> int:
    """``memory.budget`` in bytes: up to 1 it is a share of what the device has."""
    return round(setting * device_total) if setting <= 1 else round(setting)


def victims(candidates: Iterable[C], shortage: int) -> list[C] | None:
    """Whom to unload so that ``shortage`` bytes get free: low priority first, then the least recently used.

    None if all of them together are too small; then nobody should be unloaded in vain.
    """
    chosen: list[C] = []
    freed = 0
    for candidate in sorted(candidates, key=lambda c: (c.priority, c.last_used)):
        if freed >= shortage:
            break
        chosen.append(candidate)
        freed += candidate.nbytes
    return chosen if freed >= shortage else None


def format_bytes(nbytes: int) -> str:
    """``1.5 GiB``: how numbers are told to people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
