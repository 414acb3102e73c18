"""leapahead inside Transformers' own `generate`, on a model that is loaded already.

Run it with `python examples/hf_generate.py [MODEL]`: a hub name or a folder; by default the bundled model.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import leapahead
from leapahead.models.loading import bundled

PROMPT = '''class Options:
    def set_name(self, name):
        """Set the name of the option."""
        self.name = name

    def set_value(self, value):
'''


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else bundled()
    model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    inputs = tokenizer(PROMPT, return_tensors="pt")

    reference = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    stats: list[leapahead.Stats] = []
    output = model.generate(
        **inputs, max_new_tokens=48, do_sample=False, custom_generate=leapahead.hf.generate, stats=stats
    )
    assert output.tolist() == reference.tolist()
    print(f"{stats[0].committed} tokens in {stats[0].steps} forwards")

    # A streamer and stop strings need `run`: Transformers keeps both from a `custom_generate` callable.
    leapahead.hf.run(
        model,
        **inputs,
        max_new_tokens=48,
        do_sample=False,
        streamer=TextStreamer(tokenizer),
        tokenizer=tokenizer,
        stop_strings=["\n\n"],
    )


if __name__ == "__main__":
    main()
