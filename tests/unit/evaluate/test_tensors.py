"""Functions of plsc.evaluate give the same results for tensors as for arrays."""

import inspect
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

import plsc.evaluate
from plsc.evaluate.plots import plot_roc
from plsc.evaluate.verification import verify

generator = np.random.default_rng(3)
LABELS = np.repeat(np.arange(20), 3)
CENTRES = generator.standard_normal((20, 16))[LABELS]
# Values that bfloat16 has exactly.
EMBEDDINGS = torch.from_numpy(CENTRES + generator.standard_normal((60, 16))).bfloat16().float().numpy()
PAIRS = generator.integers(0, 60, (200, 2))
IS_SAME = LABELS[PAIRS[:, 0]] == LABELS[PAIRS[:, 1]]
COSINES = (generator.integers(-64, 64, 200) / 128 + IS_SAME / 2).astype(np.float32)


def written(function, *arguments):
    function(*arguments)
    return next(one for one in arguments if isinstance(one, Path)).read_bytes()


# All functions have the same wrapper (see the last test): results, keywords, files, and arrays in a dict.
CALLS = {
    "verify": lambda as_is, path: verify(as_is(EMBEDDINGS), as_is(IS_SAME), 5, pairs=as_is(PAIRS)),
    "plot_roc": lambda as_is, path: written(plot_roc, {"a": (as_is(COSINES), as_is(IS_SAME))}, path),
}


def with_gradient(array):
    tensor = torch.from_numpy(array)
    return tensor.bfloat16().requires_grad_() if tensor.dtype == torch.float32 else tensor


def same(first, second):
    if hasattr(first, "__dict__"):
        first, second = vars(first), vars(second)
    np.testing.assert_equal(first, second)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [torch.from_numpy, with_gradient])
def test_tensors_give_the_results_of_arrays(name, kind, tmp_path):
    same(CALLS[name](kind, tmp_path / "a"), CALLS[name](np.asarray, tmp_path / "b"))


def test_every_public_function_of_arrays_takes_tensors():
    for path in Path(plsc.evaluate.__file__).parent.glob("[a-z]*.py"):
        module = import_module(f"plsc.evaluate.{path.stem}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            is_own = function.__module__ == module.__name__ and not name.startswith(
                ("_", "embed_", "classify")
            )
            if is_own and "ndarray" in str({**function.__annotations__, "return": ""}):
                assert hasattr(function, "__wrapped__"), f"{path.stem}.{name}"
