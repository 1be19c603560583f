"""The page as a person uses it."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.async_api import expect

from emlxd.errors import ServerFault
from tests.daemon_of_fakes import FakeDaemon
from tests.fakes import FakeWorker


def worker_of(daemon: FakeDaemon, name: str = "smol") -> FakeWorker:
    resident = daemon.registry.find(name).resident
    assert resident is not None
    return resident.worker  # type: ignore[return-value]


def saying(daemon: FakeDaemon, text: str) -> None:
    """The model answers ``text``, in one word."""
    worker_of(daemon).words = [text]


def roles(worker: FakeWorker) -> str:
    """Who spoke in the conversation that the worker got last."""
    return " ".join(message["role"] for message in worker.chats[-1]["messages"])


async def ask(page: Any, text: str) -> None:
    await page.fill("#prompt", text)
    await page.press("#prompt", "Enter")


async def test_models_and_what_they_do(page: Any, daemon: FakeDaemon) -> None:
    cards = page.locator(".card")
    await expect(cards.nth(0)).to_contain_text("Loaded, also called s")
    await expect(cards.nth(0)).to_contain_text("0 of 4 slots in use")
    await expect(cards.nth(1)).to_contain_text("Not loaded")
    await expect(page.locator("#memory-text")).to_have_text("100 B of 1000 B")
    await cards.nth(1).get_by_role("button", name="Load large").click()
    await expect(cards.nth(1)).to_contain_text("Loaded")
    await expect(page.locator("#memory-text")).to_have_text("200 B of 1000 B")
    await cards.nth(0).get_by_role("button", name="Unload smol").click()
    await expect(cards.nth(0)).to_contain_text("Not loaded")
    assert daemon.house.in_memory == ["large"]


async def test_it_is_small_and_soon_there(page: Any, daemon: FakeDaemon) -> None:
    """benchmarks/first_paint.py measures in earnest; here a busy machine may take its time."""
    timing = "performance.getEntriesByType('{}').map((entry) => entry.toJSON())"
    (first,) = await page.evaluate(timing.format("navigation"))
    rest = await page.evaluate(timing.format("resource"))
    files = [first, *(entry for entry in rest if entry["initiatorType"] != "fetch")]
    assert all(entry["name"].startswith(daemon.url) for entry in files)
    assert sum(entry["transferSize"] for entry in files) < 150_000
    await page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
    paints = await page.evaluate(timing.format("paint"))
    assert all(paint["startTime"] < 5_000 for paint in paints)


@pytest.mark.parametrize("operator", [True, False])
async def test_only_models_that_chat_are_offered(page: Any, daemon: FakeDaemon, operator: bool) -> None:
    if not operator:
        await page.route("**/admin/status", lambda route: route.fulfill(status=403, json={}))
    tuned = {"name": "tuned", "source": {"path": "/tuned"}}
    models = {
        "smol": {"adapters": [tuned]},
        "vectors": {"kind": "embedding", "load": "on_demand"},
        "ranker": {"kind": "rerank", "load": "on_demand"},
    }
    daemon.write(models)
    await daemon.reloader.reload()
    await expect(page.locator(".card")).to_have_count(3)
    await expect(page.locator(".card").nth(1)).to_contain_text("Not loaded, for embeddings")
    await expect(page.locator("#model option")).to_have_text(["smol", "smol:tuned"])


async def test_a_load_that_fails_says_why(page: Any, daemon: FakeDaemon) -> None:
    daemon.house.failures["large"] = ServerFault("large.gguf is truncated")
    await page.get_by_role("button", name="Load large").click()
    await expect(page.locator(".card").nth(1)).to_contain_text("large.gguf is truncated")


async def test_chat_is_kept_and_can_be_asked_again(page: Any, daemon: FakeDaemon) -> None:
    await page.click("#toggle-settings")
    await page.fill("[name=system]", "Be short.")
    await page.fill("[name=temperature]", "0.5")
    await page.fill("[name=max_tokens]", "4")
    await ask(page, "Count.")
    answer = page.locator(".turn.answer")
    await expect(answer.locator(".said")).to_have_text("one two three four")
    await expect(answer.locator(".foot")).to_contain_text("4 tokens")
    await expect(answer.locator(".foot")).to_contain_text("cut at the token limit")
    worker = worker_of(daemon)
    assert roles(worker) == "system user"
    assert worker.submitted[-1].sampling.temperature == 0.5

    await page.reload()
    await expect(answer.locator(".said")).to_have_text("one two three four")
    worker.words = ["Again."]
    await page.get_by_role("button", name="Regenerate").click()
    await expect(answer.locator(".said")).to_have_text("Again.")
    await ask(page, "And now?")
    await expect(answer).to_have_count(2)
    assert [message["role"] for message in worker.chats[-1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]

    await page.click("#new-chat")
    await expect(answer).to_have_count(0)
    await page.click("#open-history")
    await page.get_by_role("button", name="Count.", exact=True).click()
    await expect(answer).to_have_count(2)


async def test_stop_ends_the_generation(page: Any, daemon: FakeDaemon) -> None:
    worker = worker_of(daemon)
    worker.gate.clear()
    worker.free = 2
    await ask(page, "Count.")
    said = page.locator(".turn.answer .said")
    await expect(said).to_have_text("one two")
    await expect(page.locator(".card").nth(0)).to_contain_text("1 of 4 slots in use")
    await page.keyboard.press("Escape")
    await expect(page.locator(".turn.answer .foot")).to_contain_text("stopped")
    await worker.idle.wait()
    assert worker.cancelled
    await expect(said).to_have_text("one two")


async def test_a_failure_in_the_middle_is_shown_with_what_came_before(page: Any, daemon: FakeDaemon) -> None:
    worker = worker_of(daemon)
    worker.failure, worker.fail_after = ServerFault("The step failed."), 2
    await ask(page, "Count.")
    await expect(page.locator(".turn.answer [role=alert]")).to_have_text("The step failed.")
    await expect(page.locator(".turn.answer .said")).to_have_text("one two")


THOUGHT = """\
data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}

data: {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm, **let** me."}, "finish_reason": null}]}

data: {"choices": [{"index": 0, "delta": {"content": "Four."}, "finish_reason": "stop"}]}

data: [DONE]

"""


async def test_thinking_is_folded(page: Any) -> None:
    await page.route("**/v1/chat/completions", lambda route: route.fulfill(body=THOUGHT))
    await ask(page, "Two and two?")
    await expect(page.locator(".turn.answer > .said")).to_have_text("Four.")
    thought = page.locator(".thought .said")
    await expect(thought).to_be_hidden()
    await page.get_by_text("Thoughts").click()
    await expect(thought).to_have_text("Hm, let me.")


HOSTILE = """<script>window.broken = 1</script> <img src=x onerror="window.broken = 2">

[a](javascript:window.broken=3) ![b](https://elsewhere.invalid/pixel.png) [c](data:text/html,x)

```html
<b onclick="x">bold</b>
```
"""


async def test_what_a_model_says_is_never_more_than_text(page: Any, daemon: FakeDaemon) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    saying(daemon, HOSTILE)
    await ask(page, "<i>Hello</i>")
    said = page.locator(".turn.answer .said")
    await expect(said).to_contain_text('<b onclick="x">bold</b>')
    await expect(said).to_contain_text("<script>window.broken = 1</script>")
    assert await said.locator("script, img, b, [onclick], [onerror]").count() == 0
    assert await said.locator("a").evaluate_all("links => links.map(link => link.href)") == [
        "https://elsewhere.invalid/pixel.png"
    ]
    assert await page.evaluate("window.broken") is None
    await expect(page.locator(".turn.user")).to_have_text("<i>Hello</i>")
    assert all(url.startswith(daemon.url) for url in asked)


MARKDOWN = """# Title

Some **bold**, *soft*, `code` and ~~old~~ text with 2 * 3 * 4 and snake_case_name.

1. first
   - inner
2. second

| a | b |
|---|:-:|
| 1 | `x` |

> quoted

```python
print("**not bold**")
```
"""


async def test_markdown(page: Any, daemon: FakeDaemon) -> None:
    saying(daemon, MARKDOWN)
    await ask(page, "Show me.")
    said = page.locator(".turn.answer .said")
    await expect(said.locator("blockquote")).to_have_text("quoted")
    assert await said.locator("h2").inner_text() == "Title"
    marks = [await said.locator(f"p > {tag}").inner_text() for tag in ("strong", "em", "code", "del")]
    assert marks == ["bold", "soft", "code", "old"]
    await expect(said).to_contain_text("2 * 3 * 4 and snake_case_name")
    assert await said.locator("ol > li").count() == 2
    assert await said.locator("ol > li > ul > li").inner_text() == "inner"
    assert await said.locator("td").all_inner_texts() == ["1", "x"]
    assert await said.locator("pre").inner_text() == 'print("**not bold**")'


async def test_a_broken_reload_is_shown_with_its_line(page: Any, daemon: FakeDaemon) -> None:
    await page.click("#tab-config")
    await expect(page.locator("#config-text")).to_contain_text("name: smol")
    daemon.path.write_text("models:\n  - name: smol\n    slotz: 4\n")
    await page.click("#reload-now")
    await expect(page.locator("#reload")).to_contain_text("The last reload failed")
    await expect(page.locator("#reload")).to_contain_text("config.yaml:3: models[0].slotz")
    await expect(page.locator("#reload-flag")).to_be_visible()
    daemon.write({"smol": {"aliases": ["t"]}})
    await page.click("#reload-now")
    await expect(page.locator("#reload")).to_contain_text("removed: large")
    await expect(page.locator("#reload-flag")).to_be_hidden()
    await expect(page.locator(".card")).to_have_count(1)


async def test_a_key_is_asked_for_and_used(browser: Any, daemon: FakeDaemon) -> None:
    daemon.write({"smol": {}}, server={"api_keys": ["k-1"]})
    await daemon.reloader.reload()
    page = await browser.new_page()
    await page.goto(daemon.url)
    await page.click("#key-cancel")
    await page.click("#unlock")
    await page.fill("#key", "wrong")
    await page.keyboard.press("Enter")
    await expect(page.locator("#key-note")).to_have_text("The API key is not known to this server.")
    await page.fill("#key", "k-1")
    await page.keyboard.press("Enter")
    await expect(page.locator("#health")).to_have_text("ready")
    await ask(page, "Count.")
    await expect(page.locator(".turn.answer .said")).to_have_text("one two three four five six")
    await page.context.close()


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (834, 1000), (390, 800)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits(page: Any, daemon: FakeDaemon, width: int, height: int, scheme: str) -> None:
    await page.set_viewport_size({"width": width, "height": height})
    await page.emulate_media(color_scheme=scheme)
    saying(daemon, MARKDOWN + "\n" + "x" * 500)
    await ask(page, "y" * 500)
    await expect(page.locator(".turn.answer .foot")).to_be_visible()
    for tab in ("chat", "config", "models"):
        if await page.locator(f"#tab-{tab}").is_visible():
            await page.click(f"#tab-{tab}")
            wide = await page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, tab
            assert await faults(page) == []


async def faults(page: Any) -> list[str]:
    """What axe-core finds that is serious."""
    axe = pytest.importorskip("axe_playwright_python.async_playwright")
    found = await axe.Axe().run(page)
    return [
        f"{fault['id']}: {node['html']}"
        for fault in found.response["violations"]
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]


async def test_the_keyboard_is_enough(page: Any, daemon: FakeDaemon) -> None:
    await page.focus("#tab-chat")
    await page.keyboard.press("ArrowRight")
    await expect(page.locator("#config")).to_be_visible()
    await page.keyboard.press("ArrowLeft")
    await expect(page.locator("#chat")).to_be_visible()
    await page.focus("#prompt")
    await page.keyboard.type("line one")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("line two")
    await page.keyboard.press("Enter")
    await expect(page.locator(".turn.user")).to_contain_text("line two")
    assert worker_of(daemon).chats[-1]["messages"][-1]["content"] == "line one\nline two"
