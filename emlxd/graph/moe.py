"""Mixtures of experts: a router picks a few feed-forward layers for every token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import mlx.core as mx

from emlxd.graph.activations import Activation
from emlxd.graph.delta import Delta
from emlxd.graph.layers import Linear, Mlp, Norm, arrays_in
from emlxd.graph.spec import ExpertsSpec
from emlxd.graph.weights import Weight

_SORTED_FROM: Final = 64  # rows from which reading each expert once pays for sorting


@dataclass(frozen=True, slots=True)
class Routed:
    """What goes through which ``experts``, int [...], from x [..., 1, in] beside them.

    ``rows`` int [...] are those of the batch. ``at`` uint32 [...]: where in x each finds its input, None for
    its own place. ``in_order``: ``experts`` is sorted.
    """

    experts: mx.array
    rows: mx.array
    at: mx.array | None = None
    in_order: bool = False


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """One projection of all experts: W [experts, out, in], bias [experts, out], and what adapters add."""

    weight: Weight
    bias: mx.array | None = None
    delta: Delta | None = None

    def __call__(self, x: mx.array, routed: Routed) -> mx.array:
        """x [..., 1, in] -> [..., 1, out]"""
        y = self._plain(x, routed)
        added = self.delta.of_experts(x, routed.experts, routed.rows) if self.delta else None
        return y if added is None else y + added

    def _plain(self, x: mx.array, routed: Routed) -> mx.array:
        w, experts = self.weight, routed.experts
        if (q := w.quantization) and w.scales is not None and not w.expands(experts.size):
            y = mx.gather_qmm(
                x,
                w.data,
                w.scales,
                w.biases,
                lhs_indices=routed.at,
                rhs_indices=experts,
                transpose=True,
                group_size=q.group_size,
                bits=q.bits,
                mode=q.mode,
                sorted_indices=routed.in_order,
            )
        else:
            data = w.dense(x.dtype).data.swapaxes(-1, -2)
            y = mx.gather_mm(x, data, routed.at, experts, sorted_indices=routed.in_order)
        return y if self.bias is None else y + self.bias[experts][..., None, :]


@dataclass(frozen=True, slots=True)
class Experts:
    """``gate_up`` is the gate and the linear part of every expert, in one projection or two.

    ``places`` is 0, 1, 2 ..., and ``tokens`` the token that each of them belongs to, uint32 [_SORTED_FROM]:
    what a step of few tokens indexes its inputs with. Made once, since MLX would make them in every layer.
    """

    gate_up: tuple[ExpertLinear, ...]
    down: ExpertLinear
    activation: Activation
    places: mx.array
    tokens: mx.array

    @staticmethod
    def of(
        gate_up: tuple[ExpertLinear, ...], down: ExpertLinear, activation: Activation, chosen: int
    ) -> Experts:
        """``chosen`` of them for each token."""
        places = mx.arange(_SORTED_FROM, dtype=mx.uint32)
        return Experts(gate_up, down, activation, places, places // chosen)

    def __call__(self, x: mx.array, chosen: mx.array) -> mx.array:
        """x [B, L, D], chosen int [B, L, k] -> [B, L, k, D]"""
        rows = mx.broadcast_to(mx.arange(x.shape[0])[:, None, None], chosen.shape)
        if chosen.size < _SORTED_FROM:
            tokens, places = (at[: chosen.size].reshape(chosen.shape) for at in (self.tokens, self.places))
            return self._run(x[..., None, None, :], Routed(chosen, rows, tokens), places).squeeze(-2)
        order = mx.argsort(chosen.flatten())
        tokens = x.reshape(-1, 1, x.shape[-1])[order // chosen.shape[-1]]
        out = self._run(tokens, Routed(chosen.flatten()[order], rows.flatten()[order], in_order=True), None)
        return out[mx.argsort(order)].reshape(*chosen.shape, -1)

    def _run(self, x: mx.array, routed: Routed, places: mx.array | None) -> mx.array:
        parts = [part(x, routed) for part in self.gate_up]
        gate, up = parts if len(parts) == 2 else mx.split(parts[0], 2, axis=-1)
        return self.down(self.activation(gate, up), replace(routed, at=places))


@dataclass(frozen=True, slots=True)
class Moe:
    """A feed-forward layer of experts, with a shared one or without."""

    spec: ExpertsSpec
    router: Linear
    correction: mx.array | None
    experts: Experts
    shared: Mlp | None
    shared_gate: Linear | None

    def __call__(self, x: mx.array) -> mx.array:
        chosen, weights = _ROUTES[self.spec.scores](self.router(x).astype(mx.float32), self)
        out = (self.experts(x, chosen) * weights[..., None].astype(x.dtype)).sum(axis=-2)
        if self.shared is not None:
            shared = self.shared(x)
            out = out + (mx.sigmoid(self.shared_gate(x)) * shared if self.shared_gate else shared)
        return out

    def idle_bytes(self, rows: int) -> int:
        """Bytes of the experts that none of ``rows`` chooses, on average if each chooses at random."""
        idle = (1 - self.spec.chosen / self.spec.count) ** rows
        experts = arrays_in((self.experts.gate_up, self.experts.down))
        return round(idle * sum(array.nbytes for array in experts))


@dataclass(frozen=True, slots=True)
class MoeBeside:
    """Experts beside a plain feed-forward layer, as in Gemma 4: every part has norms of its own.

    ``expert_scale`` [experts] multiplies what an expert gives.
    """

    plain: Mlp
    plain_in: Norm
    plain_out: Norm
    moe: Moe
    router_in: Norm
    experts_in: Norm
    experts_out: Norm
    expert_scale: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        moe = self.moe
        chosen, weights = _softmax_chosen(moe.router(self.router_in(x)).astype(mx.float32), moe)
        weights = (weights * self.expert_scale[chosen]).astype(x.dtype)
        found = (moe.experts(self.experts_in(x), chosen) * weights[..., None]).sum(axis=-2)
        return self.plain_out(self.plain(self.plain_in(x))) + self.experts_out(found)

    def idle_bytes(self, rows: int) -> int:
        """As that of ``Moe``."""
        return self.moe.idle_bytes(rows)


Route = Callable[[mx.array, Moe], tuple[mx.array, mx.array]]
"""Router logits, float32 [B, L, experts] -> the chosen experts and their weights, both [B, L, k]."""


def _softmax(logits: mx.array, moe: Moe) -> tuple[mx.array, mx.array]:
    spec = moe.spec
    if not spec.normalize or spec.chosen == 1 or spec.groups > 1 or moe.correction is not None:
        return _best(mx.softmax(logits, axis=-1), moe)
    chosen, weights = _softmax_chosen(logits, moe)  # the same numbers with three operations fewer
    return chosen, weights if spec.scale == 1.0 else weights * spec.scale


def _sigmoid(logits: mx.array, moe: Moe) -> tuple[mx.array, mx.array]:
    return _best(mx.sigmoid(logits), moe)


def _best(scores: mx.array, moe: Moe) -> tuple[mx.array, mx.array]:
    spec = moe.spec
    ranked = scores if moe.correction is None else scores + moe.correction
    chosen = _top(_in_best_groups(ranked, spec) if spec.groups > 1 else ranked, spec.chosen)
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    if spec.normalize and spec.chosen > 1:
        weights = weights / mx.maximum(weights.sum(axis=-1, keepdims=True), 1e-20)
    return chosen, weights * spec.scale


def _in_best_groups(ranked: mx.array, spec: ExpertsSpec) -> mx.array:
    """Zero for every expert outside the best groups."""
    groups = mx.unflatten(ranked, -1, (spec.groups, -1))
    counted = 1 if spec.group_score == "best" else 2
    scores = mx.topk(groups, counted, axis=-1).sum(axis=-1)
    best = _top(scores, spec.top_groups)
    open_groups = mx.put_along_axis(mx.zeros_like(scores), best, mx.array(1.0), axis=-1)
    return mx.where(open_groups[..., None] > 0, groups, 0.0).flatten(-2)


def _softmax_chosen(logits: mx.array, moe: Moe) -> tuple[mx.array, mx.array]:
    chosen = _top(logits, moe.spec.chosen)
    return chosen, mx.softmax(mx.take_along_axis(logits, chosen, axis=-1), axis=-1)


def _sparsemixer(logits: mx.array, moe: Moe) -> tuple[mx.array, mx.array]:
    """One expert after the other; each is weighed against those that come close to it."""
    left, chosen, weights = logits, [], []
    for _ in range(moe.spec.chosen):
        best = left.max(axis=-1, keepdims=True)
        expert = mx.argmax(left, axis=-1, keepdims=True)
        behind = (best - logits) / mx.maximum(mx.abs(logits), best)
        close = mx.where(behind > 2 * moe.spec.jitter, -mx.inf, left)
        weights.append(mx.take_along_axis(mx.softmax(close, axis=-1), expert, axis=-1))
        chosen.append(expert)
        left = mx.put_along_axis(left, expert, mx.array(-mx.inf), axis=-1)
    return mx.concatenate(chosen, axis=-1), mx.concatenate(weights, axis=-1)


def _top(scores: mx.array, count: int) -> mx.array:
    return mx.argpartition(scores, kth=-count, axis=-1)[..., -count:]


_ROUTES: Final[Mapping[str, Route]] = {
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "softmax_chosen": _softmax_chosen,
    "sparsemixer": _sparsemixer,
}
