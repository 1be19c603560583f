"""A model with an adapter, as clients see it."""

from __future__ import annotations

import httpx
import ollama
import openai
import pytest

from tests.daemon import Daemon

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

QUESTION = [{"role": "user", "content": "Name three colours."}]


def ask(daemon: Daemon, model: str) -> openai.types.chat.ChatCompletion:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", timeout=300) as client:
        return client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=24)  # type: ignore[arg-type]


def test_an_adapter_answers_under_its_own_name(daemon: Daemon) -> None:
    base, adapted = ask(daemon, "smol"), ask(daemon, "smol:odd")
    assert adapted.model == "smol:odd"
    assert adapted.choices[0].message.content != base.choices[0].message.content
    assert ask(daemon, "smol").choices[0].message.content == base.choices[0].message.content
    metrics = httpx.get(f"{daemon.url}/metrics").text
    assert 'emlxd_prompt_tokens_total{model="smol:odd"}' in metrics


def test_every_list_of_models_has_it(daemon: Daemon) -> None:
    served = {model["id"]: model for model in httpx.get(f"{daemon.url}/v1/models").json()["data"]}
    assert served["smol:odd"]["parent"] == "smol"
    assert "parent" not in served["smol"]
    with ollama.Client(daemon.url) as client:
        tags = {model.model: model for model in client.list().models}
    assert tags["smol:odd"].digest != tags["smol"].digest
    (status,) = httpx.get(f"{daemon.url}/admin/status").json()["models"]
    assert status["adapters"] == ["smol:odd"]


def test_an_adapter_that_is_not_there_is_no_model(daemon: Daemon) -> None:
    answer = httpx.post(f"{daemon.url}/v1/chat/completions", json={"model": "smol:no", "messages": QUESTION})
    assert answer.status_code == 404
    assert "smol:no" in answer.json()["error"]["message"]
