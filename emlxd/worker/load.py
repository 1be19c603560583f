"""Makes a ``Model`` of a model's files. Called on the worker's own thread."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import structlog
from pydantic import ValidationError

from emlxd.config import ModelSettings, SamplingDefaults
from emlxd.core import ModelInfo, SamplingParams
from emlxd.graph.batch import Begin, PrefillRow
from emlxd.json_files import read_object
from emlxd.text.chat_template import ChatTemplate
from emlxd.text.tokenizer import Tokenizer
from emlxd.worker.runner import Runner
from emlxd.worker.sequence import Adapter

log = structlog.get_logger(__name__)

WARM_UP: Final = 16  # tokens of a prompt
KV_FORMAT: Final = 2  # raise it with every change of how the prefix cache lays out its blocks

Identity = tuple[str, list[tuple[str, int, int, int]]]


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model: how it is run, and how its text is read and written.

    ``sampling`` is what its own files say of it. ``fingerprint`` differs for whatever makes its K/V differ.
    ``adapters`` are by name.
    """

    info: ModelInfo
    runner: Runner
    tokenizer: Tokenizer
    template: ChatTemplate | None
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    fingerprint: str = ""
    adapters: Mapping[str, Adapter] = field(default_factory=dict)


def load_model(
    settings: ModelSettings, path: Path, turn: AbstractContextManager[None] | None = None
) -> Model:
    """Loads the files at ``path`` onto the device, in ``turn`` with others. Raises ModelFormatError."""
    from emlxd.graph.open import open_runner

    # Before the runner, which whatever fails after it has to free.
    tokenizer = read_tokenizer(path)
    template = _template(tokenizer)
    own = _own_sampling(path / "generation_config.json")
    sampling = _sampling(settings.sampling, own)
    files, adapters = _identity(path), _adapters(settings)
    runner = open_runner(path, settings, tokenizer.eos_ids, turn)
    turn = turn or nullcontext()
    with freed_if_it_fails(runner.close, turn):
        _warm_up(runner, sampling, turn)
    return Model(
        info=ModelInfo(
            architecture=runner.architecture,
            max_context=runner.max_context,
            slots=runner.slots,
            vocab_size=runner.vocab_size,
            sampling=sampling,
            stream_chunks=settings.stream_chunks,
        ),
        runner=runner,
        tokenizer=tokenizer,
        template=template,
        sampling=own,
        fingerprint=_fingerprint(settings, files, runner.max_context),
        adapters=adapters,
    )


@contextmanager
def freed_if_it_fails(close: Callable[[], None], turn: AbstractContextManager[None]) -> Iterator[None]:
    """For the first steps of a model that nobody else has yet."""
    try:
        yield
    except BaseException:
        with turn:
            close()
        raise


def _warm_up(runner: Runner, usual: SamplingParams, turn: AbstractContextManager[None]) -> None:
    """Computes a short answer as most requests ask for it, and a greedy one.

    MLX compiles most of what a request needs when it is first used, for seconds. Each step takes a ``turn``,
    as those of requests do.
    """
    prompt = (0,) * min(WARM_UP, runner.max_context - 1)
    for sampling in dict.fromkeys((usual, replace(usual, temperature=0.0))):
        with turn:
            runner.prefill([PrefillRow(0, 0, prompt, Begin(sampling, prompt))]).read()
        with turn:
            runner.decode([len(prompt)]).read()
    runner.release(0)


def retuned(model: Model, settings: ModelSettings) -> Model:
    """The same loaded model with the defaults for requests that ``settings`` have."""
    sampling = _sampling(settings.sampling, model.sampling)
    return replace(model, info=replace(model.info, sampling=sampling, stream_chunks=settings.stream_chunks))


def _adapters(settings: ModelSettings) -> Mapping[str, Adapter]:
    return {
        adapter.name: Adapter(number, repr((adapter.name, _identity(adapter.source.path))).encode())
        for number, adapter in enumerate(settings.adapters, 1)
        if adapter.source.path
    }


def _fingerprint(settings: ModelSettings, files: Identity, max_context: int) -> str:
    """Differs for whatever makes K/V differ: ``max_context`` too, for which longrope scales its rotation."""
    form = (settings.dtype, settings.weights, str(settings.quantize))
    computed = (KV_FORMAT, *form, max_context, files)
    return hashlib.blake2b(repr(computed).encode(), digest_size=12).hexdigest()


def _identity(path: Path) -> Identity:
    """Tells these files from all others: where they are, and the name, size and times of each.

    Fine-tunes of a model share names and sizes, and archives and copies may set any time of modification.
    Only the time of the last change (ctime) is the system's own: it differs when files are replaced by
    others.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    return str(path.resolve()), [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats]


def read_tokenizer(path: Path) -> Tokenizer:
    """That of the model at ``path``. Raises ModelFormatError."""
    if path.is_dir():
        return Tokenizer.from_folder(path)
    from emlxd.graph.gguf import GgufFile

    return Tokenizer.from_gguf(GgufFile(path).metadata)


def _template(tokenizer: Tokenizer) -> ChatTemplate | None:
    source = tokenizer.chat_templates.get("default")
    return ChatTemplate(source, tokenizer.special_tokens) if source else None


def _own_sampling(path: Path) -> SamplingDefaults:
    """Of a model's generation_config.json. Raises ModelFormatError for one that is no JSON.

    What makes no sense in it is not worth refusing the model: a warning says that it is left out.
    """
    found = read_object(path)
    if found.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    known = {name: found[name] for name in SamplingDefaults.model_fields if name in found}
    try:
        return SamplingDefaults.model_validate(known)
    except ValidationError as error:
        wrong = {str(mistake["loc"][0]): mistake["msg"] for mistake in error.errors()}
        log.warning("the model's own sampling is left out in part", file=str(path), **wrong)
        return SamplingDefaults(**{name: value for name, value in known.items() if name not in wrong})


def _sampling(settings: SamplingDefaults, own: SamplingDefaults) -> SamplingParams:
    """The defaults for requests: the values of config.yaml, else the model's own, else OpenAI's."""
    usual = SamplingParams()

    def pick(name: str) -> Any:
        values = [getattr(some, name) for some in (settings, own, usual)]
        return next(value for value in values if value is not None)

    return SamplingParams(**{name: pick(name) for name in SamplingDefaults.model_fields})
