"""The options of `emlxd bench`, and its two outputs, against a daemon that counts what it is asked."""

from __future__ import annotations

import json
import threading
from xml.etree import ElementTree

import pytest

from emlxd.bench import engine
from emlxd.graph import random_model
from tests.cli.conftest import Daemon

SHORT = ("--repeats", "2", "--max-tokens", "4", "--prompt-tokens", "8")
QUICK = ("--warmup", "0", *SHORT)


def test_a_table(emlxd, daemon):
    result = emlxd("bench", "--url", daemon.url, "--concurrency", "1,2", *QUICK)
    assert result.exit_code == 0, result.stderr
    assert "small at http://" in result.stdout
    measured = [asked for asked in daemon.asked if asked["max_tokens"] == 4]
    assert len(measured) == 2 * (1 + 2)
    assert {asked["model"] for asked in measured} == {"small"}


def test_json_and_every_option(emlxd, daemon):
    result = emlxd(
        *("bench", "--url", daemon.url, "--model", "s", "--concurrency", "2", "--json"),
        *("--shared-prefix", "3", "--extra", '{"top_k": 1}', "--timeout", "20", *QUICK),
    )
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["model"], report["repeats"], report["shared_prefix"]) == ("s", 2, 3)
    assert [row["concurrency"] for row in report["rows"]] == [2]
    assert daemon.asked[-1]["top_k"] == 1


def test_two_servers_are_compared(emlxd, daemon, tmp_path):
    options = ("--url", daemon.url, "--vs", daemon.url, "--vs-model", "s", "--concurrency", "1,2", *QUICK)
    result = emlxd("bench", *options, "--svg", "chart.svg")
    assert result.exit_code == 0, result.stderr
    assert "small at http://" in result.stdout and "s at http://" in result.stdout
    assert f"{daemon.url} against {daemon.url}" in result.stdout
    assert {asked["model"] for asked in daemon.asked} == {"small", "s"}
    chart = ElementTree.parse(tmp_path / "chart.svg").getroot()
    assert len(chart.findall("{*}rect")) == 2 + 2 * 2  # the legend, and a bar for each row of each server
    reports = json.loads(emlxd("bench", *options, "--json").stdout)
    assert [report["model"] for report in reports] == ["small", "s"]


def test_a_chart_that_cannot_be_written(emlxd, daemon):
    result = emlxd("bench", "--url", daemon.url, "--concurrency", "1", "--svg", "none/chart.svg", *QUICK)
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        1,
        "Cannot write none/chart.svg: No such file or directory.",
    )


def test_the_address_comes_from_the_configuration(emlxd, config, daemon):
    config(port=daemon.server_port)
    assert emlxd("bench", *QUICK).exit_code == 0
    assert daemon.asked


def test_a_key_of_the_configuration_goes_to_its_daemon_and_to_no_other(emlxd, config, daemon, monkeypatch):
    """A daemon with keys wants one for the list of its models, too."""
    monkeypatch.setenv("EMLXD_SERVER__API_KEYS", '["of-the-file"]')
    config(port=daemon.server_port)
    assert emlxd("bench", *QUICK).exit_code == 0
    assert daemon.keys == {"Bearer of-the-file"}
    with Daemon() as other:
        threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        assert emlxd("bench", "--vs", other.url, *QUICK).exit_code == 0
        other.shutdown()
        assert other.keys == {None}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--concurrency", "0"),
        ("--concurrency", "1,x"),
        ("--prompt-tokens", ""),
        ("--extra", "[1]"),
        ("--extra", "{"),
    ],
)
def test_a_wrong_value_is_wrong_usage(emlxd, option, value):
    result = emlxd("bench", "--url", "http://127.0.0.1:1", option, value)
    assert result.exit_code == 2
    assert option in result.stderr


def test_no_server(emlxd):
    result = emlxd("bench", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "No server answers at http://127.0.0.1:1" in result.stderr


TINY = dict(random_model.SHAPES["llama-1b"]) | {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 6000,
}


def test_the_engine_alone_and_mlx_lm_in_turn_with_it(emlxd, monkeypatch):
    monkeypatch.setattr(random_model, "SHAPES", {"tiny": TINY})
    monkeypatch.setattr(engine, "copy_bandwidth", lambda: 1e10)
    options = ("bench", "--engine", "tiny", "--bits", "4", "--peer", "--concurrency", "1,2", *SHORT)
    result = emlxd(*options, "--json")
    assert result.exit_code == 0, result.stderr
    lines = json.loads(result.stdout)
    assert [(line["name"], line["streams"]) for line in lines] == [
        (name, streams) for streams in (1, 2) for name in ("emlxd", "mlx-lm")
    ]
    assert all(line["prefill"] > 0 and line["decode"] > 0 for line in lines)
    for known in ("host_ms", "device_ms", "ceiling"):
        assert all((line[known] is None) == (line["name"] == "mlx-lm") for line in lines)
    assert all(line["step_ms"] == pytest.approx(1000 * line["streams"] / line["decode"]) for line in lines)
    assert all(line["operations"] > 20 for line in lines)
    table = emlxd(*options).stdout
    assert "The engine alone: tiny" in table
    assert all(heading in table for heading in ("step", "host", "device", "ops"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--engine", "tiny", "--vs", "http://x"), "--vs means nothing with --engine"),
        (("--engine", "tiny", "--shared-prefix", "0"), "--shared-prefix means nothing with --engine"),
        (("--engine", "tiny", "--prompt-tokens", "8,16"), "--prompt-tokens takes one number"),
        (("--engine", ".", "--bits", "4"), "--bits is for random weights"),
        (("--peer",), "--peer means nothing without --engine"),
    ],
)
def test_options_that_would_be_ignored_are_refused(emlxd, options, problem):
    result = emlxd("bench", *options)
    assert result.exit_code == 1 and problem in result.stderr


def test_an_engine_of_nothing_is_named(emlxd):
    result = emlxd("bench", "--engine", "llama-9b", *SHORT)
    assert result.exit_code == 1
    shapes = "qwen3-0.6b, llama-1b, llama-8b, qwen3-30b-a3b, tiny"
    assert result.stderr.strip() == f"llama-9b is neither a folder nor one of {shapes}."
