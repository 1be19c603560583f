"""Encoders against hidden states that Transformers computed of the same weights, and what is made of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest

from emlxd.config import ModelSettings, Source
from emlxd.core import TextBatch, TokenizedText
from emlxd.description import describe
from emlxd.errors import ModelFormatError
from emlxd.footprint import predict
from emlxd.graph.embedder import MlxEmbedder
from emlxd.graph.encoder import DistanceBias
from emlxd.graph.encoder_families import ENCODERS
from emlxd.graph.open_embedder import kind_of, open_embedder
from tests.agreement import close
from tests.graph.tiny import make_llama, save
from tests.graph.tiny_encoders import CONFIGS, DATA, PAIR, TEXTS, write_encoder

REFERENCES: Final[dict[str, Any]] = json.loads(DATA.read_text())
PAIRED: Final = [name for name, found in REFERENCES.items() if found["rerank"]]
ALL_MODES: Final = {f"pooling_mode_{mode}": True for mode in ("cls_token", "max_tokens", "mean_tokens")} | {
    f"pooling_mode_{mode}": True for mode in ("mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
}


def settings(folder: Path, **more: Any) -> ModelSettings:
    """Not compiled unless the test is about it: on a CPU that takes a compiler seconds."""
    usual = {"compile": False, "dtype": "float32"}
    return ModelSettings(name="tiny", source=Source(path=folder), **usual | more)


def whole(*texts: list[int]) -> list[TokenizedText]:
    return [TokenizedText(tuple(text), len(text)) for text in texts]


def run(embedder: MlxEmbedder, texts: list[TokenizedText], height: int, length: int) -> list[list[float]]:
    """Of a step with one text in a row."""
    return embedder.run([TextBatch(tuple((text,) for text in texts), height, length)])[0]


def write_modules(folder: Path, pooling: dict[str, Any], *more: str) -> None:
    names = ["Transformer", "Pooling", *more]
    modules = [
        {"path": f"{place}_{name}" if place else "", "type": f"sentence_transformers.models.{name}"}
        for place, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    found = REFERENCES["bert"]["embedding"]
    return write_encoder(tmp_path / "bert", found["config"], found["shapes"])


def pooled(states: list[list[float]]) -> list[np.ndarray[Any, Any]]:
    """What each of sentence-transformers' poolings is, from a text's hidden states alone."""
    rows = np.array(states)
    count = len(rows)
    ramp = np.arange(1, count + 1)[:, None]
    return [
        rows[0],
        rows.max(axis=0),
        rows.mean(axis=0),
        rows.sum(axis=0) / np.sqrt(count),
        (rows * ramp).sum(axis=0) / ramp.sum(),
        rows[-1],
    ]


def test_every_family_has_a_reference() -> None:
    assert set(REFERENCES) == set(ENCODERS)


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("name", "compile"), [*((name, False) for name in REFERENCES), ("bert", True), ("modernbert", True)]
)
def test_hidden_states_are_those_of_transformers(name: str, compile: bool, tmp_path: Path) -> None:
    """Through all poolings at once, for texts of different lengths in one step."""
    found = REFERENCES[name]["embedding"]
    folder = write_encoder(tmp_path, found["config"], found["shapes"])
    write_modules(folder, ALL_MODES)
    embedder = open_embedder(folder, settings(folder, compile=compile))
    made = run(embedder, whole(*TEXTS), 4, 16)
    for vector, states in zip(made, found["hidden"], strict=True):
        assert close(vector, np.concatenate(pooled(states)), on_cpu=2e-4)


@pytest.mark.numeric
def test_ranges_of_distance_are_those_of_mpnet() -> None:
    """The first distance of each: one by one up to 8, and from there two to a doubling."""
    starts = [*range(9), 12, 16, 23, 32, 46, 64, 91]
    (made,) = np.array(DistanceBias(mx.arange(32)[:, None])(1, 200)[0])
    for i in (0, 99):
        expected = [np.searchsorted(starts, abs(j - i), "right") - 1 + 16 * (j > i) for j in range(200)]
        assert made[i].tolist() == expected


def test_a_long_text_through_mpnet_beside_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import MPNetConfig, MPNetModel

    torch.manual_seed(0)
    config = MPNetConfig(**CONFIGS["mpnet"] | {"max_position_embeddings": 302})
    oracle = MPNetModel(config).eval()
    torch.nn.init.normal_(oracle.encoder.relative_attention_bias.weight)
    oracle.save_pretrained(tmp_path)
    write_modules(tmp_path, {"pooling_mode": "mean"})
    text = [2 + (7 * n * n + 3 * n) % 46 for n in range(300)]
    with torch.no_grad():
        expected = oracle(torch.tensor([text])).last_hidden_state.mean(dim=1)[0].numpy()
    made = run(open_embedder(tmp_path, settings(tmp_path)), whole(text), 1, 300)
    assert close(made[0], expected, on_cpu=1e-4)


@pytest.mark.numeric
@pytest.mark.parametrize("name", PAIRED)
def test_scores_of_pairs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    found = REFERENCES[name]["rerank"]
    folder = write_encoder(tmp_path, found["config"], found["shapes"])
    assert kind_of(settings(folder), folder) == "rerank"
    tokens, second_at = PAIR
    made = run(open_embedder(folder, settings(folder)), [TokenizedText(tuple(tokens), second_at)], 2, 8)
    assert close(made, [[found["score"]]], on_cpu=1e-5)


@pytest.mark.numeric
def test_padding_and_company_change_nothing(bert: Path) -> None:
    embedder = open_embedder(bert, settings(bert))
    together = run(embedder, whole(*TEXTS), 4, 16)
    for text, vector in zip(TEXTS, together, strict=True):
        assert close(run(embedder, whole(text), 1, 24)[0], vector, on_cpu=1e-6)


@pytest.mark.numeric
@pytest.mark.parametrize("name", REFERENCES)
def test_several_texts_in_a_row_do_not_see_each_other(name: str, tmp_path: Path) -> None:
    found = REFERENCES[name]["embedding"]
    folder = write_encoder(tmp_path, found["config"], found["shapes"])
    write_modules(folder, ALL_MODES)
    embedder = open_embedder(folder, settings(folder))
    first, second, third = whole(*TEXTS)
    batch = TextBatch(((second, first), (third, first, third)), 3, 24)
    made = embedder.run([batch])[0]
    for place, vector in zip((1, 0, 2, 0, 2), made, strict=True):
        expected = np.concatenate(pooled(found["hidden"][place]))
        assert close(vector, expected, on_cpu=2e-4)


@pytest.mark.numeric
def test_batches_side_by_side_are_as_good_as_alone(bert: Path) -> None:
    embedder = open_embedder(bert, settings(bert))
    batches = [TextBatch(tuple((text,) for text in whole(*TEXTS)), 4, length) for length in (16, 24)]
    lanes = batches[: embedder.lanes]
    for together, batch in zip(embedder.run(lanes), lanes, strict=True):
        assert close(together, embedder.run([batch])[0], on_cpu=0.0)


def test_a_shape_is_traced_once(bert: Path) -> None:
    embedder = open_embedder(bert, settings(bert, compile=True))
    for rows, length in [(1, 8), (2, 16), (1, 8), (2, 16), (1, 8)]:
        run(embedder, whole(TEXTS[0]), rows, length)
    assert embedder.traces == 2


@pytest.mark.numeric
def test_without_sentence_files_the_mean_has_length_1(bert: Path) -> None:
    (vector,) = run(open_embedder(bert, settings(bert)), whole(TEXTS[1]), 1, 16)
    mean = pooled(REFERENCES["bert"]["embedding"]["hidden"][1])[2]
    assert close(vector, mean / np.linalg.norm(mean), on_cpu=1e-4)


@pytest.mark.numeric
def test_sentence_files_say_what_is_normalised_read_and_written_before(bert: Path) -> None:
    write_modules(bert, {"pooling_mode": "cls"}, "Normalize")
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "document"}
    (bert / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (bert / "sentence_bert_config.json").write_text('{"max_seq_length": 24}')
    embedder = open_embedder(bert, settings(bert))
    (vector,) = run(embedder, whole(TEXTS[1]), 1, 16)
    first = pooled(REFERENCES["bert"]["embedding"]["hidden"][1])[0]
    assert close(vector, first / np.linalg.norm(first), on_cpu=1e-4)
    assert embedder.max_context == 24
    assert embedder.sentence.prompts == {"query": "query: ", "document": ""}
    assert embedder.sentence.default_prompt == "document"
    longer = settings(bert).model_copy(update={"max_context": 40})
    assert open_embedder(bert, longer).max_context == 40


@pytest.mark.numeric
def test_a_dense_layer_after_pooling(bert: Path) -> None:
    write_modules(bert, {"pooling_mode_mean_tokens": True}, "Dense")
    weight = np.random.default_rng(0).normal(size=(5, 32)).astype(np.float32)
    folder = bert / "2_Dense"
    folder.mkdir()
    config = {"in_features": 32, "out_features": 5, "bias": False}
    config |= {"activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), {"linear.weight": mx.array(weight)})
    (vector,) = run(open_embedder(bert, settings(bert)), whole(TEXTS[1]), 1, 16)
    mean = pooled(REFERENCES["bert"]["embedding"]["hidden"][1])[2]
    assert close(vector, np.tanh(weight @ mean), on_cpu=1e-3)


@pytest.mark.numeric
def test_a_decoder_embeds_with_its_last_token(tmp_path: Path) -> None:
    """Saved as embedding models are: without a head, and without the name of what is below it."""
    oracle, config = make_llama()
    save(tmp_path, oracle, config)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = dict(mx.load(str(file)))
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if "lm_head" not in name}
    mx.save_safetensors(str(file), bare)
    embedder = open_embedder(tmp_path, settings(tmp_path, kind="embedding"))
    made = run(embedder, whole(*TEXTS), 4, 16)
    for text, vector in zip(TEXTS, made, strict=True):
        with mx.stream(mx.cpu):
            last = np.array(oracle.model(mx.array([text])))[0, -1]
        assert close(vector, last / np.linalg.norm(last), on_cpu=1e-5)


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("modules.json", "[1]", "expected a list of modules"),
        ("modules.json", '[{"type": "x.LSTM"}]', "'x.LSTM', supported are Transformer"),
        ("1_Pooling/config.json", "{}", "no pooling mode out of cls"),
        ("1_Pooling/config.json", '{"pooling_mode": ["cls", "median"]}', "no pooling mode out of cls"),
        ("1_Pooling/config.json", '{"include_prompt": false}', "include_prompt is false"),
        ("1_Pooling/config.json", "{", "cannot be read"),
        ("config.json", '{"model_type": "bert", "vocab_size": 48}', "config has no"),
    ],
)
def test_files_that_cannot_be_used(bert: Path, file: str, text: str, expected: str) -> None:
    write_modules(bert, {"pooling_mode_cls_token": True})
    (bert / file).write_text(text)
    with pytest.raises(ModelFormatError, match=expected):
        open_embedder(bert, settings(bert))


def test_tensors_that_are_missing_or_left_over(bert: Path) -> None:
    tensors = dict(mx.load(str(bert / "model.safetensors")))
    del tensors["encoder.layer.1.output.dense.bias"]
    mx.save_safetensors(str(bert / "model.safetensors"), tensors)
    with pytest.raises(ModelFormatError, match=r"lacks tensors.*layer\.1\.output\.dense\.bias"):
        open_embedder(bert, settings(bert))


def test_a_classifier_is_no_reranker(tmp_path: Path) -> None:
    found = REFERENCES["bert"]["rerank"]
    labels = {"id2label": {"0": "no", "1": "yes", "2": "maybe"}}
    folder = write_encoder(tmp_path, found["config"] | labels, found["shapes"])
    with pytest.raises(ModelFormatError, match="tells 3 labels apart"):
        open_embedder(folder, settings(folder))


@pytest.mark.parametrize("use", [open_embedder, lambda path, settings: predict(settings, path)])
def test_max_context_beyond_the_models_own(bert: Path, use: Callable[[Path, ModelSettings], object]) -> None:
    with pytest.raises(ModelFormatError, match="max_context is 65, but the model was made for at most 64"):
        use(bert, settings(bert, max_context=65))


def test_the_forecast_is_for_as_many_tokens_as_the_entry_asks_for(bert: Path) -> None:
    """More than the model's own files make usual."""
    write_modules(bert, {"pooling_mode_mean_tokens": True})
    (bert / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    asked = [predict(settings(bert, max_context=wanted), bert).activations for wanted in (None, 64)]
    assert asked[0] < asked[1]
    cards = [describe(settings(bert, max_context=wanted)) for wanted in (None, 64)]
    assert [card and card.max_context for card in cards] == [16, 64]


def test_what_a_model_is_for_is_read_off_its_files(bert: Path, tmp_path: Path) -> None:
    assert kind_of(settings(bert), bert) == "embedding"
    decoder = tmp_path / "decoder"
    decoder.mkdir()
    (decoder / "config.json").write_text('{"model_type": "qwen3"}')
    assert kind_of(settings(decoder), decoder) == "chat"
    assert kind_of(settings(decoder, kind="embedding"), decoder) == "embedding"
    (decoder / "modules.json").write_text("[]")
    assert kind_of(settings(decoder), decoder) == "embedding"
