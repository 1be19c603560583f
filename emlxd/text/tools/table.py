"""All formats, and which one a model was taught."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from emlxd.text.tools.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from emlxd.text.tools.format import Format
from emlxd.text.tools.gemma import FUNCTION_GEMMA, GEMMA
from emlxd.text.tools.glm import Glm
from emlxd.text.tools.granite import GRANITE
from emlxd.text.tools.harmony import Harmony
from emlxd.text.tools.hermes import Hermes
from emlxd.text.tools.llama import Llama
from emlxd.text.tools.minimax import MiniMax
from emlxd.text.tools.mistral import Mistral, NamedMistral
from emlxd.text.tools.phi import PHI
from emlxd.text.tools.qwen_coder import QwenCoder

# The first that knows a template is the one: what shares its marks with others comes first.
_ROWS: tuple[Format, ...] = (
    Harmony(),
    GEMMA,
    FUNCTION_GEMMA,
    MiniMax(),
    QwenCoder(),
    Glm(),
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    NamedMistral(),
    Mistral(),
    PHI,
    GRANITE,
    Hermes(),
    Llama(),
)

FORMATS: Final = MappingProxyType({format.name: format for format in _ROWS})


def detect(template: str) -> Format | None:
    """The format that a chat template teaches, if it is a known one."""
    return next((format for format in _ROWS if format.knows(template)), None)
