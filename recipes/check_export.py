"""Open a saved model in this process, which knows nothing of the training run, and compare it with what was trained.

    python recipes/check_export.py DIRECTORY REFERENCE.safetensors [--prompt TEXT]

REFERENCE holds `input_ids` (1, length) and the `logits` (1, length, vocabulary) that the trained model gave for them.
Ends with status 1 if the reopened model gives other logits. Then the model continues a prompt.
"""

from __future__ import annotations

import argparse
import sys

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> int:
    """Command line of this script; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="directory written by save_model")
    parser.add_argument("reference", help="safetensors file with input_ids and logits")
    parser.add_argument("--prompt", default=None, help="text to continue (default: no generation)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to generate")
    parser.add_argument(
        "--tolerance", type=float, default=1e-5, help="largest allowed difference, relative to the largest logit"
    )
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(options.directory).eval()
    reference = load_file(options.reference)
    with torch.inference_mode():
        logits = model(input_ids=reference["input_ids"]).logits.float()
    difference = (logits - reference["logits"]).abs().max().item()
    equal = difference <= options.tolerance * reference["logits"].abs().max().item()
    verdict = "equal" if equal else "DIFFERENT"
    print(f"reopened {options.directory}: largest difference of a logit {difference:.2e} ({verdict})")
    if options.prompt is not None:
        tokenizer = AutoTokenizer.from_pretrained(options.directory)
        inputs = tokenizer(options.prompt, return_tensors="pt", add_special_tokens=False)
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=options.tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
        print("generated:\n" + tokenizer.decode(output[0], skip_special_tokens=True))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
