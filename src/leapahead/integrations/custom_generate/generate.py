"""The code that Transformers runs for `custom_generate="FOLDER"`, where FOLDER or a hub repository holds this file.

    model.generate(**inputs, custom_generate="FOLDER", trust_remote_code=True, drafter="lookahead", streamer=streamer)

Copy this file to FOLDER/custom_generate/generate.py, and requirements.txt beside it. Unlike a callable, it receives
`streamer`, `tokenizer` and `assistant_model`.
"""

from typing import Any

import leapahead.integrations.hf


def generate(*inputs: Any, model: Any, **kwargs: Any) -> Any:
    """See `leapahead.hf.run`. In the repository of a model it replaces `model.generate` and is given `inputs`."""
    return leapahead.integrations.hf.run(model, *inputs, **{"inputs": None, **kwargs} if not inputs else kwargs)
