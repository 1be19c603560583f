"""The commands around the configuration and the files, as a person sees them."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from emlxd import sources
from emlxd.errors import SourceError
from tests.graph import tiny, tiny_adapters


def test_version(emlxd):
    assert emlxd("--version").stdout == f"emlxd {version('emlxd')}\n"


def test_help_names_every_command(emlxd):
    text = emlxd("--help").stdout
    assert all(name in text for name in ("serve", "check", "pull", "models", "chat", "bench"))


@pytest.mark.parametrize("arguments", [(), ("launchd",), ("systemd",)])
def test_no_line_about_a_command_is_cut_off(emlxd, arguments):
    assert "..." not in emlxd(*arguments, "--help").stdout.partition("Commands:")[2]


@pytest.mark.parametrize("command", ["bench", "chat", "check", "models", "ps", "reload", "status"])
def test_every_command_that_asks_a_daemon_can_be_told_which(emlxd, command):
    text = " ".join(emlxd(command, "--help").stdout.split())
    assert "--url URL The server; without it the address in the configuration." in text


@pytest.mark.parametrize("arguments", [["sevre"], ["check", "--nope"], ["check", "one-too-many"]])
def test_wrong_usage_exits_2(emlxd, arguments):
    assert emlxd(*arguments).exit_code == 2


def test_without_a_configuration_the_places_are_listed(emlxd):
    result = emlxd("check")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "config.yaml, config/config.yaml" in result.stderr
    assert "home/.config/emlxd/config.yaml" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_first_configuration_found_is_used(emlxd, config):
    model = "{name: %s, source: {hf: org/nowhere}}"
    for count, place in enumerate(("home/.config/emlxd/config.yaml", "config/config.yaml", "config.yaml"), 1):
        config(f"models: [{', '.join(model % name for name in 'abc'[:count])}]", place)
        assert f"{place} is in order: {count} model" in emlxd("check").stdout


def test_a_named_configuration_comes_first(emlxd, config, monkeypatch):
    config()
    named = config("models: []", "named.yaml")
    assert emlxd("check", "-c", "named.yaml").stdout == "named.yaml is in order: 0 models.\n"
    monkeypatch.setenv("EMLXD_CONFIG", str(named))
    assert "0 models" in emlxd("check").stdout


def test_a_named_configuration_that_is_missing_is_no_reason_to_take_another(emlxd, config):
    config()
    result = emlxd("check", "--config", "other.yaml")
    assert result.exit_code == 1
    assert "other.yaml: cannot read the file" in result.stderr


@pytest.mark.parametrize("command", ["check", "serve", "pull", "models", "chat"])
def test_every_problem_of_the_configuration_is_one_line(emlxd, config, command):
    config("server:\n  prot: 1\nmodels:\n  - {name: a, source: {path: a.gguf}, slots: many}\n")
    result = emlxd(command)
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert [line.split(" ")[0] for line in lines] == [
        "config.yaml:2:",
        "config.yaml:4:",
        *(["A"] if command == "chat" else []),
    ]


def test_check_tells_the_memory_of_the_models_that_are_here(emlxd, config, tmp_path):
    model, shape = tiny.make_llama()
    tiny.save(tmp_path / "tiny", model, shape)
    entry = "{name: %s, source: {path: %s}, slots: 4}"
    config(f"models: [{entry % ('a', 'tiny')}, {entry % ('b', 'absent.gguf')}]\nmemory: {{budget: 1GiB}}")
    result = emlxd("check")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == ["model", "weights", "cache", "prefix", "cache", "working", "memory", "total"]
    assert rows[1][:5] == ["a", "521.8", "KiB", "1.5", "MiB"]
    assert rows[-1] == ["budget", "1.0", "GiB"]
    assert f"b: {tmp_path / 'absent.gguf'} does not exist, expected a .gguf file" in result.stderr
    assert result.exit_code == 1  # `serve` could not start


def test_check_finds_a_model_that_can_never_be_loaded(emlxd, config, tmp_path):
    model, shape = tiny.make_llama()
    tiny.save(tmp_path / "tiny", model, shape)
    config("models: [{name: a, source: {path: tiny}}]\nmemory: {budget: 1MiB}")
    result = emlxd("check")
    assert (result.exit_code, result.stderr) == (1, "config.yaml:1: a: larger than memory.budget alone.\n")


def test_check_says_what_can_be_downloaded(emlxd, config):
    config("models: [{name: a, source: {hf: org/nowhere}}]")
    result = emlxd("check")
    assert result.stderr == "a: the files are not here yet; `emlxd pull` fetches them.\n"
    assert result.exit_code == 0


def test_check_finds_keys_with_which_nothing_could_start(emlxd, config, tmp_path):
    config("server: {api_keys_file: none.txt}\nmodels: []")
    result = emlxd("check")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"Cannot read server.api_keys_file {tmp_path / 'none.txt'}: No such file or directory.\n"
    )


def test_check_tells_of_every_model_that_cannot_be_read(emlxd, config, tmp_path):
    model, shape = tiny.make_llama()
    tiny.save(tmp_path / "tiny", model, shape)
    (tmp_path / "empty").mkdir()
    names = {"a": "small.gguf", "b": "empty", "c": "tiny"}
    (tmp_path / "small.gguf").touch()
    config("models:\n" + "".join(f"- {{name: {name}, source: {{path: {names[name]}}}}}\n" for name in names))
    result = emlxd("check")
    assert result.exit_code == 1 and "in order" not in result.stdout
    assert result.stdout.splitlines()[1].split()[0] == "c"
    told = [line.split(" ")[0] for line in result.stderr.splitlines()]
    assert told == ["config.yaml:2:", "config.yaml:3:"] and "small.gguf: the file is empty" in result.stderr


def test_check_finds_a_context_that_no_model_has(emlxd, config, tmp_path):
    model, shape = tiny.make_llama()
    tiny.save(tmp_path / "tiny", model, shape)
    config("models: [{name: a, source: {path: tiny}, max_context: 4096}]")
    result = emlxd("check")
    assert result.exit_code == 1
    assert "max_context is 4096, but the model was made for at most 512 tokens" in result.stderr


def test_adapters_are_checked_listed_and_pulled_with_their_model(emlxd, config, tmp_path):
    model, shape = tiny.make_llama()
    tiny.save(tmp_path / "tiny", model, shape)
    entry = "models: [{name: a, source: {path: tiny}, adapters: [{name: x, source: {path: x}}]}]"
    config(entry)
    assert f"a: {tmp_path / 'x'} does not exist" in emlxd("check").stderr
    assert "missing" in emlxd("models").stdout
    tiny_adapters.save_mlx(tmp_path / "x", model, seed=1)
    rows = [line.split() for line in emlxd("check").stdout.splitlines()]
    assert rows[1][:2] == ["a", "565.2"]
    assert rows[2] == ["a:x"]
    assert "  a:x" in emlxd("models").stdout
    assert emlxd("pull", "a:x").stdout == f"a: {tmp_path / 'tiny'}\na:x: {tmp_path / 'x'}\n"
    (tmp_path / "x" / "adapter_config.json").unlink()
    broken = emlxd("check")
    assert (broken.exit_code, "has no adapter_config.json" in broken.stderr) == (1, True)


def test_pull_says_where_the_files_are(emlxd, config, tmp_path):
    config()
    result = emlxd("pull", "s")
    assert (result.exit_code, result.stdout) == (0, f"small: {tmp_path / 'small.gguf'}\n")


def test_pull_of_files_that_cannot_be_had_says_so(emlxd, config, tmp_path):
    config()
    result = emlxd("pull")
    assert result.exit_code == 1
    assert f"{tmp_path / 'absent.gguf'} does not exist" in result.stderr


def test_pull_of_an_unknown_model_lists_the_known_ones(emlxd, config):
    config()
    result = emlxd("pull", "smal")
    assert result.exit_code == 1
    assert result.stderr == "No model is called 'smal'. The configuration has: small, absent.\n"


def test_pull_fetches_what_is_missing_and_reports_progress(emlxd, config, tmp_path, monkeypatch):
    config()

    def fetch(source, progress):
        progress("downloading", 1, None)
        progress("downloading", 5, 5)
        source.path.touch()
        return source.path

    monkeypatch.setattr(sources, "fetch", fetch)
    result = emlxd("pull")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1] == f"absent: {tmp_path / 'absent.gguf'}"
    assert "Fetching absent" in result.stderr
    assert "Fetching small" not in result.stderr


def test_a_failed_download_is_one_line(emlxd, config, monkeypatch):
    config()

    def fetch(source, progress):
        progress("downloading", 1, 5)
        raise SourceError("no route to the registry")

    monkeypatch.setattr(sources, "fetch", fetch)
    result = emlxd("pull", "absent")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "absent: no route to the registry")


def test_what_cannot_be_fetched_keeps_no_other_from_it(emlxd, config, tmp_path, monkeypatch):
    config("models: [{name: a, source: {path: a.gguf}}, {name: b, source: {path: b.gguf}}]")

    def fetch(source, progress):
        if source.path.name == "a.gguf":
            raise SourceError("gone")
        source.path.touch()

    monkeypatch.setattr(sources, "fetch", fetch)
    result = emlxd("pull")
    assert result.exit_code == 1
    assert [line for line in result.stderr.splitlines() if ":" in line] == ["a: gone"]
    assert (tmp_path / "b.gguf").exists()


def test_models_lists_files_and_states(emlxd, config, daemon):
    config(port=daemon.server_port)
    result = emlxd("models")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == ["model", "aliases", "source", "files", "state"]
    assert (rows[1][0], rows[1][1], rows[1][-2:]) == ("small", "s", ["here", "loaded"])
    assert (rows[2][0], rows[2][-2:]) == ("absent", ["missing", "failed"])
    assert result.stderr == ""


def test_models_asks_the_daemon_that_is_named(emlxd, config, daemon):
    config(port=1)
    result = emlxd("models", "--url", daemon.url)
    assert result.stdout.splitlines()[1].split()[-1] == "loaded"
    assert result.stderr == ""


def test_models_works_while_the_daemon_loads(emlxd, config, daemon):
    daemon.states = None
    config(port=daemon.server_port)
    result = emlxd("models")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].split()[-2:] == ["here", "-"]
    assert result.stderr == "Not every model answers: small is loading.\n"


def test_models_works_without_a_daemon(emlxd, config):
    config()
    result = emlxd("models")
    assert result.exit_code == 0
    assert "No server answers at http://127.0.0.1:1" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], ("pydantic", "yaml", "rich.progress", "emlxd.config")),
        (["check"], ("rich.progress", "huggingface_hub", "emlxd.metrics")),
        (["models"], ("huggingface_hub", "httpx")),
    ],
)
def test_a_command_imports_only_what_it_needs(config, tmp_path, arguments, heavy):
    # No model is here: the memory of one is a question for MLX.
    config("models: [{name: absent, source: {path: absent.gguf}}]")
    code = "import sys\nfrom emlxd.cli import app\napp(standalone_mode=False)\nprint(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    loaded = set(out.splitlines()[-1].split())
    never = {"mlx", "mlx.core", "quart", "hypercorn", "tokenizers", "transformers", "structlog", "numpy"}
    assert not loaded & (never | set(heavy))
