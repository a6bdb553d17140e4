"""The type checker that `pytest --jaxtyping-packages` puts on every function of the packages: shapes, dtypes, types.

`__init__` is left out. JAX rebuilds a pytree dataclass through it with whatever the leaves have become: stacked by
scan, batched by vmap, shapes in eval_shape, None or numbers in tree.map. All other functions and methods are checked.
"""

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    return function if function.__name__ == "__init__" else _check(function)
