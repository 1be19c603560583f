"""The command line. A command's modules are imported when it runs, so that a mistake costs no second."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from emlxd.cli import bench, chat, check, doctor, models, ps, pull, reload, serve, service, status
from emlxd.errors import UserError

EXIT_STATUS: Final = (
    "Exit status: 0 done; 1 something of yours is wrong, and one plain line says what; 2 wrong usage; "
    "70 `serve` gave up on a stuck model, to be started again."
)


class _Commands(TyperGroup):
    """Says a user's mistake in plain lines on standard error, with status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            typer.echo(error.message, err=True)
            raise typer.Exit(1) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        from emlxd.version import package_version

        typer.echo(f"emlxd {package_version()}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve language models on MLX, from one YAML file."""


app: Final = typer.Typer(
    cls=_Commands,
    callback=_options,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=EXIT_STATUS,
)
for command in (
    serve.serve,
    check.check,
    doctor.doctor,
    reload.reload,
    pull.pull,
    models.models,
    status.status,
    ps.ps,
    chat.chat,
    bench.bench,
):
    app.command()(command)
for group in (service.launchd, service.systemd):
    app.add_typer(group)


def main() -> None:
    app()
