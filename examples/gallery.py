"""Variants of attention in plain PyTorch: their kernels, and their errors against float64.

python examples/gallery.py                   # those of VARIANTS
python examples/gallery.py softcap gqa       # all whose names hold a word, with their code
python examples/gallery.py --all             # the whole corpus; some minutes without a GPU
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from common import console, finish, run_case, where
from rich.syntax import Syntax

import fl_pallas as fl
from tests.programs import BY_NAME, CORPUS, Case

VARIANTS = {
    "softmax attention": "vanilla cross gqa_repeat gqa_expand mqa rope",
    "causal": "causal_tril causal_where causal_triu",
    "biases and scores": "alibi t5_bias softcap additive_mask",
    "masks": "sliding_window prefix_lm document_causal padding_lengths",
    "other normalisers": "sigmoid sink retention linear_causal max_plus",
    "science": "differential evoformer_row triangle_starting triangle_ending ipa",
    "further outputs": "with_lse with_entropy two_sums",
    "what no kernel streams": "sparsemax stick_breaking selected_keys",
}


def code(fn: Callable[..., Any]) -> str:
    """The source of a program, after that of what it calls."""
    found: dict[Any, str] = {}

    def visit(f: Callable[..., Any]) -> None:
        called = (f.__globals__.get(name) for name in f.__code__.co_names)
        for other in called:
            if inspect.isfunction(other) and other.__module__.startswith("tests.") and other not in found:
                visit(other)
        found[f] = inspect.getsource(f)

    visit(fn)
    return "\n\n".join(found.values())


def groups(words: list[str]) -> Iterator[tuple[str, list[Case]]]:
    """Titles, and the programs below each."""
    if words == ["--all"]:
        yield "the corpus", list(CORPUS)
    elif words:
        yield " ".join(words), [case for case in CORPUS if any(word in case.name for word in words)]
    else:
        for title, names in VARIANTS.items():
            yield title, [BY_NAME[name] for name in names.split()]


def main() -> None:
    words = sys.argv[1:]
    chosen = list(groups(words))
    if not any(cases for _, cases in chosen):
        sys.exit(f"no program's name holds {' or '.join(words)}")
    console.print(f"on {where()}")
    runs = []
    for title, cases in chosen:
        console.print(f"[bold]{title}[/]")
        for case in cases:
            if words and words != ["--all"]:
                console.print(Syntax(code(case.fn), "python", word_wrap=True))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", fl.FallbackWarning)  # printed below
                run = run_case(case)
            runs.append(run)
            error = f"error {run.worst.compiled:.1e}, PyTorch's {run.worst.eager:.1e}"
            count = run.explanation.kernel_count
            console.print(f"  {case.name:24} {count} kernel{'s' * (count != 1)}, {error} {run.verdict}")
            for fallback in run.explanation.fallbacks:
                console.print(f"    {fallback.what}: {fallback.why}", highlight=False)
    finish(runs, "Largest relative error against float64, beside PyTorch's own")


if __name__ == "__main__":
    main()
