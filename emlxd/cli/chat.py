"""emlxd chat"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final

import typer

from emlxd.cli.options import ConfigOption, ModelArgument, UrlOption, daemon_client
from emlxd.errors import UserError

if TYPE_CHECKING:
    from emlxd.cli.client import Client, Message

HELP: Final = """\
/system TEXT  set the system message, or remove it without TEXT
/model NAME   go on with another model, or list them without NAME
/reset        forget the conversation
/quit         leave, as Ctrl-D does
Ctrl-C stops an answer."""

# What a model says is text: control characters would be commands to the terminal.
_CONTROLS: Final = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)]) | {9: "\t", 10: "\n"}


def chat(model: ModelArgument = None, config: ConfigOption = None, url: UrlOption = None) -> None:
    """Talk to a model of the running daemon."""
    client = daemon_client(config, url)
    names = client.model_names()
    if not names:
        raise UserError(f"{client.url} serves no models that write text.")
    if model is not None and model not in names:
        raise UserError(f"{client.url} has no model '{model}' to talk to. It has: {', '.join(names)}.")
    with suppress(ImportError):
        import readline  # noqa: F401  gives input() its line editing and history
    Chat(client, model or names[0]).run()


class Chat:
    """A conversation: what was said, with which model, and the commands that change them."""

    def __init__(self, client: Client, model: str) -> None:
        self.client = client
        self.model = model
        self.system = ""
        self.messages: list[Message] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system,
            "/model": self._set_model,
            "/reset": self._reset,
            "/help": lambda _: typer.echo(HELP),
        }

    def run(self) -> None:
        typer.echo(f"{self.model} at {self.client.url}. /help lists the commands.")
        while True:
            try:
                line = input("> ").strip()
            except KeyboardInterrupt:
                typer.echo("\nCtrl-D leaves.")
                continue
            except EOFError:
                typer.echo()
                return
            if line in ("/quit", "/exit"):
                return
            try:
                self.say(line)
            except UserError as error:
                typer.echo(error.message, err=True)

    def say(self, line: str) -> None:
        """Follow a command, or answer a message. Raises UserError when the daemon refuses or is gone."""
        if not line:
            return
        if line.startswith("/"):
            name, _, argument = line.partition(" ")
            command = self._commands.get(name)
            if command is None:
                raise UserError(f"There is no command {name}. /help lists them.")
            command(argument.strip())
            return
        self._answer({"role": "user", "content": line})

    def _answer(self, question: Message) -> None:
        """A question that got no answer at all is not kept, so that it can be asked again."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        said = []
        try:
            with closing(self.client.chat(self.model, [*system, *self.messages, question])) as pieces:
                for piece in pieces:
                    said.append(piece)
                    sys.stdout.write(piece.translate(_CONTROLS))
                    sys.stdout.flush()
        except KeyboardInterrupt:
            typer.echo(" [stopped]", nl=False)
        finally:
            typer.echo()
            answer = "".join(said)
            if answer:
                self.messages += [question, {"role": "assistant", "content": answer}]

    def _set_system(self, text: str) -> None:
        self.system = text
        typer.echo("The system message is set." if text else "There is no system message.")

    def _set_model(self, name: str) -> None:
        names = self.client.model_names()
        if name in names:
            self.model = name
            typer.echo(f"Going on with {name}.")
        elif name:
            raise UserError(f"There is no model '{name}'. There are: {', '.join(names)}.")
        else:
            typer.echo("\n".join(f"{'*' if each == self.model else ' '} {each}" for each in names))

    def _reset(self, _: str) -> None:
        self.messages.clear()
        typer.echo("The conversation is forgotten.")
