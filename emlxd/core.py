"""The values that cross from the API to a worker thread and back.

All of them are frozen: a request is never changed once it is submitted, an event never once it
is delivered. Nothing here imports anything of emlxd but the errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields
from operator import add
from typing import Any, Literal

from emlxd.errors import EmlxdError

FinishReason = Literal["stop", "length", "tool_calls"]
Chunking = Literal["word", "token"]
Channel = Literal["content", "reasoning"]
Kind = Literal["chat", "embedding", "rerank"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen from the logits.

    ``temperature`` 0 is greedy. A parameter at its default changes nothing. ``logit_bias`` pairs token ids
    with what is added to their logits. ``logprobs`` asks for the log-probability of each token and of that
    many of the likeliest ones (0 to 20). No end token is sampled before ``min_tokens``.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether tokens that are there already weigh on the next one."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text is held to: a JSON schema, a regular expression, or a grammar in llguidance's Lark.

    "nested" is a list of llguidance's own, in JSON, whose first grammar refers to the others by name.

    ``param`` is the request's field that it came from, for errors.
    """

    kind: Literal["json_schema", "regex", "lark", "nested"]
    source: str
    param: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments, an object.

    If the schema cannot be enforced, a request with a ``strict`` tool is refused; without it the arguments
    may be any JSON object. ``param`` is the client's name of the schema, for errors.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool = False
    param: str = field(default="tools", compare=False)


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tags around a model's thinking, and where an answer starts.

    That is inside of them ("open"), after them ("closed"), or as the model chooses ("undecided"). ``label``
    follows the opening tag and is no thought.
    """

    open: str
    close: str
    start: Literal["open", "closed", "undecided"] = "undecided"
    label: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """How an answer is read, and what it is held to.

    ``call_format`` names the format in which it may call ``tools``. ``grammar`` holds it from the end of its
    thinking, ``call_grammar`` from its first call on; ``calls_alone``: it is to have nothing but calls. After
    ``max_reasoning_tokens`` the thinking is ended.
    """

    thinking: Thinking | None = None
    call_format: str = ""
    tools: tuple[Tool, ...] = ()
    parallel_calls: bool = True
    calls_alone: bool = False
    grammar: Grammar | None = None
    call_grammar: Grammar | None = None
    max_reasoning_tokens: int | None = None

    @property
    def guarded(self) -> bool:
        """Whether some of the answer's tokens may need a mask."""
        return bool(self.grammar or self.call_grammar) or self.max_reasoning_tokens is not None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model is and can take.

    ``max_context`` is in tokens, prompt and answer together. ``sampling`` and ``stream_chunks``
    are what a request gets that does not ask for anything else.
    """

    architecture: str
    max_context: int
    slots: int
    vocab_size: int
    sampling: SamplingParams
    stream_chunks: Chunking = "word"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a model's files say it is.

    ``nbytes`` is their size and ``modified`` their time, in Unix seconds. ``digest`` has 64 hex digits and
    differs when the files do. ``max_context`` is in tokens. ``quantization`` is how most ``parameters`` are
    stored, such as Q4_K, 4-bit or BF16. ``thinks``: it may think before it answers.
    """

    kind: Kind
    format: Literal["gguf", "safetensors"]
    architecture: str
    nbytes: int
    digest: str
    modified: float
    parameters: int
    quantization: str
    max_context: int
    template: str = ""
    thinks: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One generation, already tokenized and checked.

    ``max_tokens`` is resolved: the prompt plus ``max_tokens`` fits the model's context, and 0 means that
    the prompt is only read. ``adapter`` is the name of the model's adapter that it runs with, if it has one.
    ``stop`` holds strings that end the text and are not part of it. ``n`` answers share one prompt; their
    events carry ``index`` 0..n-1. ``continues``: an answer goes on with the prompt's text, instead of
    beginning one. ``prompt_logprobs`` asks for the log-probabilities of the prompt's own tokens, as
    ``SamplingParams.logprobs`` does for the answer's.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    n: int = 1
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    chunking: Chunking = "word"
    shape: Shape = Shape()
    adapter: str = ""
    continues: bool = False


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text, or a pair of texts, for a model that reads all of it at once.

    The second text of a pair begins at token ``second_at``; without one that is the end.
    """

    tokens: tuple[int, ...]
    second_at: int


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Texts that are read in one step: one or more in a row, ``height`` rows padded to ``length`` tokens."""

    rows: tuple[tuple[TokenizedText, ...], ...]
    height: int
    length: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, in the sense of OpenAI's ``usage``."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, more: Usage) -> Usage:
        return Usage(*map(add, astuple(self), astuple(more)))

    def beyond(self, counted: Usage) -> Usage:
        """What there is more of than in ``counted``, and nothing less than 0."""
        return Usage(
            *(max(own - known, 0) for own, known in zip(astuple(self), astuple(counted), strict=True))
        )


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a request's time went, in seconds."""

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability before sampling parameters, and the likeliest at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt, one entry a token. The first has none."""

    logprobs: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that became final: whole characters, past any possible stop string.

    ``logprobs``, if asked for, covers exactly the tokens that end within the text.
    """

    text: str
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    channel: Channel = "content"


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A part of the answer's tool call number ``call``.

    The first one of a call has its ``id`` and ``name``. The ``arguments`` of all of them join to the text
    of a JSON object, unless the answer was cut off.
    """

    call: int
    arguments: str
    id: str | None = None
    name: str | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an answer that ended by itself. With ``n`` answers there are n of them.

    ``usage.prompt_tokens`` counts the prompt once, whatever ``n`` is.
    """

    reason: FinishReason
    usage: Usage
    timing: Timing
    stop_sequence: str | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that could not be completed."""

    error: EmlxdError


@dataclass(frozen=True, slots=True)
class Distribution:
    """How values were distributed: ``counts[i]`` of them up to ``bounds[i]``, and the last count above all.

    ``total`` is the sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def __add__(self, other: Distribution) -> Distribution:
        counts = tuple(one + more for one, more in zip(self.counts, other.counts, strict=True))
        return Distribution(self.bounds, counts, self.total + other.total)


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """What a worker has done since it was started. ``traces`` are traced steps of the runner."""

    prefix_query_tokens: int
    prefix_hit_tokens: int
    traces: int
    step_seconds: Distribution
    step_batch_size: Distribution
    inter_token_seconds: Distribution

    def __add__(self, other: WorkerCounts) -> WorkerCounts:
        """What two workers of one model have done together."""
        return WorkerCounts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """A started worker at one moment.

    ``running`` and ``waiting`` count answers. ``kv_tokens`` of ``kv_capacity`` positions of its K/V cache
    are written. ``memory`` is in bytes, by part.
    """

    running: int
    waiting: int
    slots: int
    kv_tokens: int
    kv_capacity: int
    memory: Mapping[str, int]
    counts: WorkerCounts


Event = PromptScored | TextPiece | ToolCallPiece | Finished | Failed
