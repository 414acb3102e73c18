"""Which arguments a model's forward takes, and by which name it takes the cache.

In Transformers 5.24 the argument of all families, and the field of their outputs, is `cache`. Before, it was
`past_key_values`, or `cache_params` in state-space models; these names still work, with a warning. Code that comes with
a checkpoint may keep an older name under any version. So the name is read from the model's forward.
"""

from __future__ import annotations

import inspect
from typing import Any

from leapahead.core.errors import Refused

# An older name goes first: where a forward has both, `cache` is something else.
CACHE_NAMES = ("past_key_values", "cache_params", "cache", "state")


def accepts(model: Any, *names: str) -> bool:
    """Whether the model's forward names these parameters."""
    return all(name in inspect.signature(model.forward).parameters for name in names)


def takes_cache(model: Any) -> bool:
    """Whether the model's forward names a parameter for the cache."""
    return any(accepts(model, name) for name in CACHE_NAMES)


def cache_name(model: Any) -> str:
    """The name of the parameter by which the model's forward takes the cache.

    Raises:
        Refused: it has none.
    """
    found = next((name for name in CACHE_NAMES if accepts(model, name)), None)
    if found is None:
        raise Refused(f"the forward of {type(model).__name__} takes no cache")
    return found


def returned_cache(output: Any, name: str) -> Any:
    """The cache in the output of a forward that takes it by this name.

    From Transformers 5.24 on, the field has the new name also where the parameter has an older one.
    """
    return output["cache" if "cache" in output else name]
