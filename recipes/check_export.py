"""Open a saved model in this process, which knows nothing of the training run, and compare it with what was trained.

    python recipes/check_export.py DIRECTORY REFERENCE.safetensors

REFERENCE holds the inputs of a forward pass (`inputs.*`), the `logits` that the trained model gave for them, what to
generate from (`prompt.*`), and in its metadata the Auto class that opens the model (`opener`). Ends with status 1 if
the reopened model gives other logits. Then the model generates.
"""

from __future__ import annotations

import argparse
import sys

import torch
import transformers
from safetensors import safe_open
from transformers import AutoProcessor


def main() -> int:
    """Command line of this script; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="directory written by save_model")
    parser.add_argument("reference", help="safetensors file with inputs and logits")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens to generate (default: %(default)s)")
    parser.add_argument(
        "--tolerance", type=float, default=1e-5, help="largest allowed difference, relative to the largest logit"
    )
    options = parser.parse_args()

    with safe_open(options.reference, "pt") as file:
        opener = file.metadata()["opener"]
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    inputs, prompt = (
        {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
        for prefix in ("inputs.", "prompt.")
    )
    model = getattr(transformers, opener).from_pretrained(options.directory).eval()
    with torch.inference_mode():
        logits = model(**inputs).logits.float()
    difference = (logits - saved["logits"]).abs().max().item()
    equal = difference <= options.tolerance * saved["logits"].abs().max().item()
    verdict = "equal" if equal else "DIFFERENT"
    print(f"reopened {options.directory}: largest difference of a logit {difference:.2e} ({verdict})")

    # Of a text model its tokenizer.
    processor = AutoProcessor.from_pretrained(options.directory)
    pad = getattr(processor, "tokenizer", processor).pad_token_id
    model.generation_config.max_length = None  # a default that would contradict the number of tokens asked for
    output = model.generate(**prompt, max_new_tokens=options.tokens, do_sample=False, pad_token_id=pad)
    print("generated:\n" + processor.decode(output[0], skip_special_tokens=True))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
