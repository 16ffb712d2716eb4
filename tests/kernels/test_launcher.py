"""Launchers: one for all kernels of as many arguments, whoever asks, and whenever."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from triton.runtime.build import compile_module_from_src

from fl_pallas.bridge.dlpack import matmul_precision
from fl_pallas.kernels import launcher
from fl_pallas.kernels.blocks import ENGINE
from fl_pallas.kernels.compiler import compiled
from fl_pallas.kernels.cubin import _file
from fl_pallas.kernels.lower import lower
from tests.kernels.test_sizes import general, kernel

# As Triton's are: of one name, and one phase.
MODULE = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) {
  if (PyTuple_Size(args) == ARGUMENTS) Py_RETURN_NONE;
  PyErr_SetString(PyExc_TypeError, "function takes exactly ARGUMENTS arguments");
  return NULL;
}
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "of_one_name", NULL, -1, methods};
PyMODINIT_FUNC PyInit_of_one_name(void) {
  PyObject* made = PyModule_Create(&definition);
  if (made) PyModule_AddFunctions(made, methods);
  return made;
}
"""
KINDS = [(4, 0), (5, 0), (4, 2), (4, 3)]


def of_triton(source: Any, _: Any) -> Any:
    """What `CudaLauncher` does, where there is no CUDA."""
    text = MODULE.replace("ARGUMENTS", str(len(source.signature)))
    return SimpleNamespace(launch=compile_module_from_src(text, "of_one_name").launch)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many arguments the launchers have that were made, in the order in which they were asked for."""
    asked: list[int] = []
    driver: Future[Any] = Future()
    driver.set_result(SimpleNamespace(launcher_cls=lambda *a: asked.append(len(a[0].signature)) or of_triton(*a)))
    monkeypatch.setattr(launcher, "starting", lambda: driver)
    monkeypatch.setattr(launcher, "_launchers", {})
    yield asked


def test_threads_have_launchers_of_their_own(made: list[int]) -> None:
    """Sixteen threads load kernels of four kinds, a hundred each."""

    def loads(first: int) -> None:
        for n in range(first, first + 100):
            pointers, descriptors = KINDS[n % len(KINDS)]
            run = launcher.launcher(pointers, descriptors).result()
            run.launch(*[None] * (pointers + descriptors))

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(loads, range(16)))
    assert sorted(made) == [4, 5, 6, 7]


def test_what_could_not_be_made_is_tried_again(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tests.kernels.test_launcher.of_triton", lambda *_: 1 / 0)
        assert isinstance(launcher.launcher(3, 0).exception(), ZeroDivisionError)
    launcher.launcher(3, 0).result().launch(1, 2, 3)


@pytest.mark.parametrize("name", ["vanilla", "document_causal"])
@pytest.mark.parametrize("sizes", [False, True], ids=["of one size", "of several"])
@pytest.mark.parametrize("engine", [False, True], ids=["by addresses", "by descriptors"])
def test_as_many_arguments_as_the_code_takes(name: str, sizes: bool, engine: bool) -> None:
    k = general(name) if sizes else kernel(name, 128)
    places = range(len(k.operands)) if engine else ()
    lowered = lower(k.plan, k.operands, matmul_precision(False), k.outputs, k.sizes, frozenset(places))
    with _file(lowered) as path:
        kinds = [*compiled(path, ENGINE, {"num_warps": lowered.warps}).src.signature.values()]
    pointers, descriptors = lowered.arguments
    assert all(kind.startswith("*") for kind in kinds[:pointers]) and len(kinds) == pointers + descriptors
    assert all("tensordesc" in kind for kind in kinds[pointers:]) and bool(descriptors) == engine
