"""docs/models.md says what the loader knows."""

from pathlib import Path

from emlxd.graph.models_page import page


def test_the_page_is_up_to_date() -> None:
    file = Path(__file__).parents[2] / "docs" / "models.md"
    assert file.read_text("utf-8") == page(), (
        "write it anew: python -m emlxd.graph.models_page > docs/models.md"
    )
