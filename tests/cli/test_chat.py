"""Talking to a daemon on the terminal."""

from __future__ import annotations

import pytest

from emlxd.cli.chat import Chat
from emlxd.cli.client import Client
from emlxd.errors import UserError


@pytest.fixture
def chat(daemon):
    return Chat(Client(daemon.url), "small")


def test_a_session(emlxd, config, daemon):
    config(port=daemon.server_port)
    result = emlxd("chat", "s", stdin="Hi\n\n/nonsense\nAgain\n/quit\nnever\n")
    assert result.exit_code == 0
    assert result.stdout.count("Hello there\n") == 2
    assert "no command /nonsense" in result.stderr
    assert [asked["model"] for asked in daemon.asked] == ["s", "s"]
    assert [message["content"] for message in daemon.asked[1]["messages"]] == ["Hi", "Hello there", "Again"]


@pytest.mark.parametrize("end", [b"", b'data: {"choi', b'data: {"error": "gone"}\n\n'])
def test_an_answer_that_breaks_off_is_told_of(emlxd, config, daemon, end):
    config(port=daemon.server_port)
    daemon.end = end
    result = emlxd("chat", stdin="Hi\n/quit\n")
    assert result.exit_code == 0
    assert "Hello there\n" in result.stdout and "broke off" in result.stderr


def test_end_of_input_ends_it(emlxd, config, daemon):
    config(port=daemon.server_port)
    result = emlxd("chat")
    assert result.exit_code == 0
    assert result.stdout.startswith("small at ")


def test_a_url_needs_no_configuration(emlxd, daemon):
    assert emlxd("chat", "--url", f"{daemon.url}/v1", stdin="Hi\n").exit_code == 0
    assert daemon.asked


def test_without_a_daemon_it_says_how_to_start_one(emlxd, config):
    config()
    result = emlxd("chat")
    assert result.exit_code == 1
    assert "Is `emlxd serve` running?" in result.stderr


def test_an_unknown_model_is_refused_with_the_known_ones(emlxd, config, daemon):
    config(port=daemon.server_port)
    result = emlxd("chat", "big")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no model 'big' to talk to. It has: small, s, absent." in result.stderr


def test_commands(chat, daemon, capsys):
    chat.say("/system Be brief.")
    chat.say("Hi")
    chat.say("/model absent")
    chat.say("/reset")
    chat.say("/system")
    chat.say("Hi")
    assert [asked["model"] for asked in daemon.asked] == ["small", "absent"]
    assert daemon.asked[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert daemon.asked[1]["messages"] == [{"role": "user", "content": "Hi"}]
    capsys.readouterr()
    chat.say("/model")
    assert capsys.readouterr().out.splitlines() == ["  small", "  s", "* absent"]
    chat.say("/help")
    assert "/reset" in capsys.readouterr().out
    with pytest.raises(UserError, match="no model 'big'"):
        chat.say("/model big")


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(chat, monkeypatch):
    stopped = []

    def answer(model, messages):
        try:
            yield "Once"
            raise KeyboardInterrupt
        finally:
            stopped.append(True)

    monkeypatch.setattr(chat.client, "chat", answer)
    chat.say("Tell me a story")
    assert stopped
    assert [message["content"] for message in chat.messages] == ["Tell me a story", "Once"]


def test_a_refused_question_is_not_kept(chat, daemon):
    daemon.refusal = (400, "The prompt is too long.")
    with pytest.raises(UserError, match=r"^The prompt is too long\.$"):
        chat.say("Hi")
    assert chat.messages == []


def test_an_error_in_the_middle_of_a_stream_is_shown(chat, daemon):
    daemon.pieces = ["Half", {"error": {"message": "The worker died."}}]
    with pytest.raises(UserError, match="The worker died"):
        chat.say("Hi")
    assert chat.messages[-1]["content"] == "Half"


def test_what_a_model_says_cannot_command_the_terminal(chat, daemon, capsys):
    daemon.pieces = ["a\x1b[2Jb\x9b\tc\nd é 👩‍🚀"]
    chat.say("Hi")
    assert capsys.readouterr().out == "a[2Jb\tc\nd é 👩‍🚀\n"
