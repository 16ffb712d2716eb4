"""What the documents print is what the compiler does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fl_pallas as fl
from fl_pallas.config import Config

from .oracle import check

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
# A stage's name at the start of a paragraph, and the text that follows.
STAGE = re.compile(r"(?<=^`)(\w+)(`.*\n\n```\n)((?:.+\n)+)(?=```)", re.M)


def stages() -> dict[str, str]:
    """The IR of the page's example after each pass, without inputs and sources."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        i = torch.arange(1000)
        scores = (q @ k.T / 8).masked_fill(i > i[:, None], float("-inf"))
        return scores.softmax(-1) @ v

    (graph,) = fl.explain(attention, *(torch.randn(1000, 64) for _ in range(3))).graphs
    found = {stage: text() for stage, text in graph.history}
    # TorchDynamo's order of a graph's inputs depends on its version: they are named as the fused text has them.
    inputs = dict.fromkeys(re.findall(r"arg\d_1", found["fuse"]))
    for name, letter in zip(inputs, "qkv", strict=True):
        found = {stage: text.replace(name, letter) for stage, text in found.items()}
    return {stage: re.sub(r"  # aten.*|.* = input\n", "", text) + "\n" for stage, text in found.items()}


def test_stages(request: pytest.FixtureRequest) -> None:
    """`--update-golden` rewrites the page."""
    made, text = stages(), PAGE.read_text()
    current = STAGE.sub(lambda m: m[1] + m[2] + made[m[1]], text)
    assert [m[1] for m in STAGE.finditer(text)] == ["resolve_views", "grow_regions", "fuse", "cut", "plan"]
    assert made["exchange"] == made["fuse"]
    assert made["without_divisions"] == made["expand_squares"] == made["cut"]
    if request.config.getoption("--update-golden"):
        PAGE.write_text(current)
    else:
        assert current == text, "docs/architecture.md prints an old IR; --update-golden rewrites it"


def test_readme(capsys: pytest.CaptureFixture) -> None:
    """Its example runs as it stands."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    names: dict[str, Any] = {name: torch.randn(2, 2, 128, 16) for name in "qkv"}
    names["doc"] = torch.arange(128).div(50, rounding_mode="floor").expand(2, 128)
    exec(code, names)
    check(names["attention"].__fl_original__, [names[n] for n in ("q", "k", "v", "doc")], names["out"])
    assert "1 fused kernel" in capsys.readouterr().out


@pytest.mark.parametrize("path", ["README.md", "fl_pallas/config.py"])
def test_settings(path: str) -> None:
    """Every setting is told of, with its variable."""
    told = re.findall(r"^\| `(\w+)` +\| `(FL_\w+)` ", (ROOT / path).read_text(), re.M)
    assert told == [(name, f"FL_{name.upper()}") for name in Config.__dataclass_fields__]


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links(page: Path) -> None:
    """What a page links to, or shows, is there."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    links = re.findall(r"\]\(([\w./-]+)\)", prose)
    assert [link for link in links if not (page.parent / link).exists()] == []
