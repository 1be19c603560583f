"""The worker of a model that writes text: requests in, an engine behind, answers out."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import structlog

from emlxd.config import ModelSettings
from emlxd.core import GenerateRequest, ModelInfo, Shape, Usage, WorkerStats
from emlxd.errors import RequestError, Unavailable
from emlxd.text.answer import Answer
from emlxd.text.dialect import Dialect, Wishes
from emlxd.text.grammar import GrammarCompiler
from emlxd.text.tokenizer import Tokenizer
from emlxd.worker.disk_cache import DiskCache
from emlxd.worker.engine import Engine
from emlxd.worker.gate import Gate
from emlxd.worker.load import Model, freed_if_it_fails, retuned
from emlxd.worker.mailbox import Generation, Mailbox
from emlxd.worker.model_thread import Close, ModelThread
from emlxd.worker.pacer import PrefillPacer
from emlxd.worker.scheduler import Scheduler
from emlxd.worker.sequence import Adapter, Clock, Sequence
from emlxd.worker.speculation import PromptLookup

log = structlog.get_logger(__name__)

# Tokens at the end of a prompt that tell whether it opens the model's thinking.
THINKING_TAIL: Final = 16
SPILL_LIMIT: Final = 2.0  # seconds of a stop
MESSAGE_LENGTH: Final = 30  # characters: rendering one message takes about as long as tokenizing so many


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker is told besides its model. ``prefill_slice`` and ``request_timeout`` are in seconds."""

    name: str
    max_queue: int
    prefill_chunk: int
    prefill_slice: float
    max_draft: int = 0
    request_timeout: float = 0.0
    disk: Path | None = None
    disk_bytes: int = 0
    tool_format: str | None = None

    @staticmethod
    def of(model: ModelSettings) -> WorkerOptions:
        return WorkerOptions(
            name=model.name,
            max_queue=model.max_queue,
            prefill_chunk=model.prefill_chunk,
            prefill_slice=model.prefill_slice,
            max_draft=model.speculative.max_draft,
            request_timeout=model.request_timeout,
            disk=model.prefix_cache.disk,
            disk_bytes=model.prefix_cache.disk_bytes,
            tool_format=model.tool_format,
        )


@dataclass(frozen=True, slots=True)
class _Submit:
    answers: list[Sequence]


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


class Worker(ModelThread[_Submit | _Cancel]):
    """One loaded model that writes text."""

    _doing = "computed the answer"
    _smaller = "a shorter prompt"

    def __init__(self, options: WorkerOptions, load: Callable[[], Model], gate: Gate) -> None:
        """``load`` is called on the worker's thread."""
        super().__init__(options.name, gate)
        self._options = options
        self._load = load
        self._mailbox = Mailbox(self._loop)
        self._grammars = self._new_executor("grammar")  # a new one may take seconds to compile
        self._model: Model
        self._compiler: GrammarCompiler
        self._dialect: Dialect
        self._disk: DiskCache | None = None
        self._engine: Engine | None = None
        self._memory: Mapping[str, int] = {}
        self._sent = 0  # answers that were ever put into the inbox, and taken out of it
        self._taken = 0

    @property
    def info(self) -> ModelInfo:
        return self._model.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The model's adapters by their own names."""
        return self._model.adapters

    @property
    def busy(self) -> bool:
        return self._engine is not None and not self._engine.idle

    def stats(self) -> WorkerStats | None:
        """How it stands, also after its end; None before its start is done. Waits for nobody."""
        if (engine := self._engine) is None:
            return None
        info = self.info
        return WorkerStats(
            running=engine.running,
            waiting=self._waiting(engine),
            slots=info.slots,
            kv_tokens=engine.kv_tokens,
            kv_capacity=info.slots * info.max_context,
            memory=self._memory,
            counts=engine.meters.counts(
                prefix_query_tokens=engine.prefixes.query_tokens,
                prefix_hit_tokens=engine.prefixes.hit_tokens,
            ),
        )

    async def encode_chat(
        self,
        messages: Rows[Mapping[str, Any]],
        /,
        *,
        tools: Rows[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a chat by the model's template. Raises RequestError if it has none or refuses."""
        template = self._model.template
        if template is None:
            raise RequestError(f"The model '{self.name}' has no chat template; use /v1/completions.")

        def encode() -> list[int]:
            text = template.render(
                self._dialect.messages(messages, tools),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **template_kwargs,
            )
            # The template writes the special tokens out itself.
            return self.tokenizer.encode(text, add_special_tokens=False)

        return await self._in_text_thread(encode, sum(map(_length, messages)))

    async def shape(self, prompt: Rows[int], wishes: Wishes) -> Shape:
        """The shape of an answer to ``prompt``, ready to be submitted.

        Raises RequestError for a grammar or a schema that cannot be enforced.
        """

        def shape() -> Shape:
            end = self.tokenizer.decode(prompt[-THINKING_TAIL:], skip_special_tokens=False)
            return self._dialect.shape(end, wishes)

        return await self._loop.run_in_executor(self._grammars, shape)

    def admit(self, answers: int) -> None:
        """Whether so many answers may be submitted: more than there is room for only if none waits.

        Raises QueueFull, and Unavailable when the worker is gone.
        """
        engine = self._running_engine
        waiting = self._waiting(engine)
        room = self.info.slots + self._options.max_queue - engine.running - waiting
        if room <= 0 or (waiting and answers > room):
            raise self._full()

    def submit(self, request: GenerateRequest) -> Generation:
        """Queues a request, of those for which ``admit`` was asked. Raises Unavailable as that does."""
        if not self.alive:
            raise self._unavailable()
        answers: list[Sequence] = []
        generation = Generation(request, self._cancel, lambda: _spent(answers))
        answers += [self._answer(request, generation, index) for index in range(request.n)]
        for answer in answers[1:]:
            answer.leader = answers[0]
        self._sent += len(answers)
        if not self._send(_Submit(answers)):
            generation.fail(self._unavailable())
        return generation

    def retune(self, settings: ModelSettings) -> None:
        """Takes over what may change while the model stays loaded; it holds from the next request on."""
        self._options = replace(
            self._options, max_queue=settings.max_queue, request_timeout=settings.request_timeout
        )
        self._model = retuned(self._model, settings)

    def _answer(self, request: GenerateRequest, generation: Generation, index: int) -> Sequence:
        seed = request.sampling.seed
        seed = secrets.randbits(63) if seed is None else seed + index
        now = time.monotonic()
        return Sequence(
            request=request,
            generation=generation,
            output=Answer(
                self.tokenizer,
                request,
                self._compiler.matcher,
                index=index,
                mask_bytes=self._compiler.mask_bytes,
            ),
            eos_ids=frozenset() if request.ignore_eos else self.tokenizer.eos_ids,
            sampling=replace(request.sampling, seed=seed),
            index=index,
            adapter=self.adapters[request.adapter] if request.adapter else Adapter(),
            lookup=self._lookup(request),
            clock=Clock(now, now + (self._options.request_timeout or math.inf)),
        )

    def _lookup(self, request: GenerateRequest) -> PromptLookup | None:
        """None for a request whose tokens cannot be checked several at a time."""
        params = request.sampling
        if not self._options.max_draft or params.logprobs is not None or params.penalized:
            return None
        if request.shape.guarded:
            return None
        return PromptLookup(self._options.max_draft)

    def _cancel(self, request_id: str) -> None:
        self._inbox.put(_Cancel(request_id))

    def _open(self) -> None:
        model = self._load()
        with freed_if_it_fails(model.runner.close, self._gate):
            self._take_up(model)

    def _take_up(self, model: Model) -> None:
        runner = model.runner
        self._memory = {
            "weights": runner.weight_bytes,
            "kv_cache": runner.cache_bytes,
            "prefix_cache": runner.prefix_cache_bytes,
        }
        self._model = model
        self._compiler = GrammarCompiler(model.tokenizer, model.info.vocab_size)
        template = model.tokenizer.chat_templates.get("default", "")
        self._dialect = Dialect(template, model.tokenizer, self._compiler, self._options.tool_format)
        self._disk = self._open_disk(model)
        self._engine = Engine(
            runner,
            Scheduler(slots=model.info.slots, prefill_chunk=self._options.prefill_chunk),
            PrefillPacer(self._options.prefill_slice),
            self._mailbox,
            max_draft=self._options.max_draft,
            disk=self._disk,
        )

    def _open_disk(self, model: Model) -> DiskCache | None:
        options = self._options
        if options.disk is None or not model.runner.blocks:
            return None
        return DiskCache(options.disk, self.name, model.fingerprint, options.disk_bytes)

    def _serve(self) -> None:
        while self._read_inbox():
            self._heartbeat = time.monotonic()
            with self._gate:
                self._step(self._running_engine)
        self._spill()

    def _spill(self) -> None:
        """What the prefix cache has not handed to the disk yet, as far as there is time."""
        prefixes, end = self._running_engine.prefixes, time.monotonic() + SPILL_LIMIT
        while prefixes.unspilled and time.monotonic() < end:
            with self._gate:
                prefixes.spill()

    def _fail_rest(self, error: Unavailable) -> None:
        while not self._inbox.empty():
            if isinstance(message := self._inbox.get(), _Submit):
                self._take(self._running_engine, message.answers)
        self._running_engine.fail_all(error)
        if self._disk:
            self._disk.close()

    def _free(self) -> None:
        self._compiler.close()
        self._model.runner.close()

    def _waiting(self, engine: Engine) -> int:
        """Answers that wait for a slot, those in the inbox too."""
        return engine.waiting + self._sent - self._taken

    @property
    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise self._unavailable()
        return self._engine

    def _step(self, engine: Engine) -> None:
        started = time.monotonic()
        try:
            engine.step()
            engine.meters.step_seconds.observe(time.monotonic() - started)
            engine.meters.traces = self._model.runner.traces
            if self._gate.contested:
                engine.settle()
        except Exception as error:
            shed = self._model.runner.out_of_memory(error)
            log.exception("step failed", model=self.name, requests=engine.request_ids, out_of_memory=shed)
            error.__traceback__ = None  # its frames hold arrays of the step
            engine.recover(self._fault(out_of_memory=shed), shed=shed)

    def _take(self, engine: Engine, answers: list[Sequence]) -> None:
        self._taken += len(answers)
        engine.add(answers)

    def _read_inbox(self) -> bool:
        """Takes all messages, waiting for one if there is nothing to compute. False when it is time to go."""
        engine = self._running_engine
        while not self._inbox.empty() or engine.idle:
            message = self._inbox.get()
            self._heartbeat = time.monotonic()  # before it is busy: it may have been idle for long
            match message:
                case _Submit(answers):
                    self._take(engine, answers)
                case _Cancel(request_id):
                    engine.cancel(request_id)
                case Close():
                    return False
        return True


def _length(message: Mapping[str, Any]) -> int:
    """About how many characters a message adds to a prompt."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [str(part.get("text", "")) for part in content]
    return MESSAGE_LENGTH + sum(map(len, parts))


def _spent(answers: Rows[Sequence]) -> Usage:
    """What all answers to one prompt have taken so far. The prompt was read once for all of them."""
    usages = [answer.usage for answer in answers]
    return Usage(
        prompt_tokens=max(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=usages[0].cached_tokens,
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )
