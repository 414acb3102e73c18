"""What a model's folder or a hub repository holds so that `custom_generate="that/repository"` runs leapahead.

    model.generate(**inputs, custom_generate="path/to/folder", trust_remote_code=True, drafter="lookahead")

The folder needs this file as custom_generate/generate.py, and custom_generate/requirements.txt beside it.
"""

from typing import Any

import leapahead.integrations.hf


def generate(*inputs: Any, model: Any, **kwargs: Any) -> Any:
    """See `leapahead.hf.run`. In a model's own repository this replaces `model.generate`, whence `inputs`."""
    return leapahead.integrations.hf.run(model, *inputs, **{"inputs": None, **kwargs} if not inputs else kwargs)
