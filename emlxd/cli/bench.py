"""emlxd bench"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from emlxd.cli.options import ConfigOption, JsonOption, UrlOption, daemon_client
from emlxd.errors import UserError

if TYPE_CHECKING:
    from emlxd.bench.engine import EngineOptions
    from emlxd.bench.http import BenchResult
    from emlxd.cli.client import Client


_OF_THE_ENGINE: Final = ("bits", "peer")
_OF_SERVERS: Final = (
    *("model", "config", "url", "api", "api_key", "extra", "warmup", "shared_prefix", "timeout"),
    *("vs", "vs_model", "svg"),
)


def _counts(text: str) -> tuple[int, ...]:
    """``1,4,8``"""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of numbers, expected one like 1,4,8")
    return tuple(map(int, parts))


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise typer.BadParameter(f'{text!r} is not a JSON object, expected one like {{"top_k": 1}}')
    return fields


def bench(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", show_default="the first one listed", help="The model.")
    ] = None,
    config: ConfigOption = None,
    url: UrlOption = None,
    api: Annotated[Literal["chat", "completions"], typer.Option(help="The route.")] = "chat",
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", show_default=False, help="Sent as a bearer token.")
    ] = None,
    # Typer's defaults are texts for the parser, which no type of a parsed value fits.
    concurrency: Annotated[
        Any, typer.Option(parser=_counts, metavar="N,...", help="How many requests at once.")
    ] = "1,8",
    prompt_tokens: Annotated[
        Any, typer.Option(parser=_counts, metavar="N,...", help="How long the prompts are.")
    ] = "400",
    extra: Annotated[
        Any, typer.Option(parser=_fields, metavar="JSON", help="Fields to add to every request.")
    ] = "{}",
    max_tokens: Annotated[int, typer.Option(min=1, help="How long an answer may be.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds that are measured.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds before them that are not.")] = 1,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens that every prompt begins with.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="The longest silence, in seconds.")] = 300.0,
    vs: Annotated[
        str | None, typer.Option(metavar="URL", show_default=False, help="Another server to compare with.")
    ] = None,
    vs_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default="as --model", help="What the model is called there."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            show_default=False,
            help="Measure the engine without a server: on a model's folder, or on random weights in the "
            "shape of qwen3-0.6b, llama-1b, llama-8b or qwen3-30b-a3b.",
        ),
    ] = None,
    bits: Annotated[
        int | None, typer.Option(min=2, max=8, show_default="bfloat16", help="Of random weights.")
    ] = None,
    peer: Annotated[bool, typer.Option("--peer", help="With --engine: mlx-lm in turn with it.")] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Draw a chart into a file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure any OpenAI-compatible server.

    Time to first token, gaps between tokens, tokens a second, for each number of requests at once. With
    --vs two servers are measured in the same way, one after the other, and with --engine no server at all.
    """
    _refuse(context, _OF_SERVERS if engine else _OF_THE_ENGINE, "with" if engine else "without")
    if engine is not None:
        from emlxd.bench.engine import EngineOptions

        if len(prompt_tokens) > 1:
            raise UserError("--prompt-tokens takes one number with --engine.")
        wanted = EngineOptions(concurrency, prompt_tokens[0], max_tokens, repeats)
        _measure_engine(engine, bits, wanted, peer=peer, as_json=as_json)
        return
    if vs_model and not vs:
        raise UserError("--vs-model means nothing without --vs.")
    import asyncio

    from rich.console import Console

    from emlxd.bench.http import BenchOptions, run
    from emlxd.cli.client import Client

    server = daemon_client(config, url, api_key)
    options = BenchOptions(
        url=server.url,
        model=model or _first_model(server),
        api=api,
        api_key=server.key,
        concurrency=concurrency,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        repeats=repeats,
        warmup=warmup,
        shared_prefix=shared_prefix,
        extra=extra,
        timeout=timeout,
    )
    measured = [options]
    if vs is not None:
        other = Client(vs, api_key)  # a key of the configuration is none of another server's business
        name = vs_model or model or _first_model(other)
        measured.append(replace(options, url=vs, model=name, api_key=api_key))
    with Console(stderr=True).status("") as status:
        results = [asyncio.run(run(each, status.update)) for each in measured]
    _print(results, as_json=as_json)
    if svg is not None:
        _write_chart(svg, results)


def _refuse(context: typer.Context, names: Sequence[str], where: str) -> None:
    """Raises UserError if the user gave one of these options."""
    for name in names:
        source = context.get_parameter_source(name)
        if source and source.name == "COMMANDLINE":
            raise UserError(f"--{name.replace('_', '-')} means nothing {where} --engine.")


def _print(results: Sequence[BenchResult], *, as_json: bool) -> None:
    """One result, or two and how they compare."""
    from rich.console import Console

    from emlxd.bench.report import to_comparison, to_json, to_table

    if as_json:
        texts = [to_json(result) for result in results]
        typer.echo(texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]")
        return
    for result in results:
        Console().print(to_table(result))
    if len(results) == 2:
        Console().print(to_comparison(*results))


def _measure_engine(
    model: str, bits: int | None, options: EngineOptions, *, peer: bool, as_json: bool
) -> None:
    import tempfile

    from rich.console import Console

    from emlxd.bench.engine import measure
    from emlxd.bench.report import engine_table, engine_to_json
    from emlxd.graph.random_model import SHAPES, write_model

    if model not in SHAPES and not Path(model).is_dir():
        raise UserError(f"{model} is neither a folder nor one of {', '.join(SHAPES)}.")
    if bits and model not in SHAPES:
        raise UserError("--bits is for random weights; those of a folder are as they are.")
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("measuring"):
        path = write_model(Path(folder), model, bits) if model in SHAPES else Path(model)
        lines = list(measure(path, options, peer=peer))
    if as_json:
        typer.echo(engine_to_json(lines))
    else:
        Console().print(engine_table(model, lines))


def _write_chart(path: Path, results: Sequence[BenchResult]) -> None:
    from emlxd.bench.chart import to_svg

    try:
        path.write_text(to_svg(results), encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}.") from None


def _first_model(server: Client) -> str:
    names = server.model_names()
    if not names:
        raise UserError(f"{server.url} lists no models. Name one with --model.")
    return names[0]
