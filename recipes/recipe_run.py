"""What the recipes share: how a run ends, saving, and a fresh process that reopens what was saved."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import HfArgumentParser, PreTrainedTokenizerBase, Trainer

__all__ = ["Sample", "checkpoint_of", "end", "held_out_summary", "leave", "parsed", "save", "text_sample", "where_next"]


@dataclass(frozen=True, slots=True)
class Sample:
    """What a reopened model is asked.

    Attributes:
        inputs: of a forward pass, for which it has to give the logits of the trained model.
        prompt: what it generates from.
        opener: the Auto class of transformers that opens it.
    """

    inputs: Mapping[str, Tensor]
    prompt: Mapping[str, Tensor]
    opener: str = "AutoModelForCausalLM"


def text_sample(token_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Sample:
    """A sequence of a causal language model, and the beginning of a function to go on with."""
    prompt = tokenizer("def read_text(path):\n    ", add_special_tokens=False, return_tensors="pt")
    return Sample(
        inputs={"input_ids": torch.tensor([token_ids])},
        prompt={name: prompt[name] for name in ("input_ids", "attention_mask")},
    )


def parsed(script: str | None, kinds: tuple[type[Any], ...], defaults: Mapping[str, Any]) -> tuple[Any, ...]:
    """The command line of a recipe as dataclasses; `--help` has one line of usage, then the flags of `kinds` in order.

    Args:
        script: the docstring of the recipe, whose first paragraph is the description.
        kinds: the recipe's own arguments, then those of the trainer.
        defaults: by flag, in place of those of `kinds`.
    """
    description = (script or "").partition("\n\n")[0]
    usage = f"%(prog)s [flags]\nflags of the recipe come first, those of {kinds[-1].__name__} after them"
    parser = HfArgumentParser(kinds, usage=usage, description=description)
    parser.set_defaults(**defaults)
    return parser.parse_args_into_dataclasses()


def checkpoint_of(flag: str | None) -> str | bool | None:
    """What `--resume_from_checkpoint` means: a directory, or `True` for the last checkpoint in the output directory."""
    words = {"true": True, "false": False}
    return flag if flag is None else words.get(flag.lower(), flag)


def plot_losses(trainer: Trainer, output: Path) -> Path | None:
    """Draw the losses of training and of held-out text into `loss.png`; None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    # Without pyplot: no window, whatever the machine has.
    axes = (figure := Figure(figsize=(6, 4))).subplots()
    for key, label in (("loss", "training"), ("eval_loss", "held out")):
        points = [(entry["step"], entry[key]) for entry in trainer.state.log_history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", label=label)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(output / "loss.png", dpi=120, bbox_inches="tight")
    return output / "loss.png"


def held_out_summary(trainer: Trainer, measure: str = "loss") -> str:
    """What was measured at the first and at the last evaluation, and what happened to it."""
    history = [entry for entry in trainer.state.log_history if f"eval_{measure}" in entry]
    (first_step, first), (last_step, last) = ((e["step"], e[f"eval_{measure}"]) for e in (history[0], history[-1]))
    return f"held-out {measure}: {first:.4f} at step {first_step}, {last:.4f} at step {last_step} ({last - first:+.4f})"


def save(trainer: Trainer, output: Path, sample: Sample) -> Path:
    """Save the model, and what a reopened one is asked, with the answer. Collective; returns the file of the latter."""
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(**{name: value.to(trainer.args.device) for name, value in sample.inputs.items()}).logits
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(output))
    reference = output / "reference_logits.safetensors"
    if trainer.is_world_process_zero():
        asked = {f"inputs.{name}": value for name, value in sample.inputs.items()}
        asked |= {f"prompt.{name}": value for name, value in sample.prompt.items()}
        # A copy each: what is generated from may be what the forward pass had, and a file shares no memory.
        tensors = {name: value.cpu().clone() for name, value in asked.items()} | {
            "logits": logits.float().cpu().contiguous()
        }
        save_file(tensors, str(reference), metadata={"opener": sample.opener})
    return reference


def tolerance(trainer: Trainer) -> float:
    """How far the logits of a reopened model may be off: it computes in fp32 on the CPU, whatever trained it."""
    if trainer.accelerator.mixed_precision != "no":
        return 5e-2
    return 1e-5 if trainer.args.device.type == "cpu" else 1e-2


def check_export(output: Path, reference: Path, tolerance: float) -> int:
    """Reopen the saved model in a fresh process that is part of no launch; returns its exit status."""
    launch = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    env = {key: value for key, value in os.environ.items() if not key.startswith(launch) and key not in names}
    env["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # those of reading weights, too
    script = Path(__file__).with_name("check_export.py")
    command = [sys.executable, str(script), str(output), str(reference), "--tolerance", str(tolerance)]
    return subprocess.run(command, env=env, check=False).returncode


def leave(status: int) -> NoReturn:
    """End a rank at once: torch's threads can abort an interpreter that is shut down in order, and fail the launch."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end(trainer: Trainer, output: Path, sample: Sample, measures: Sequence[str] = ("loss",)) -> int:
    """Measure, save, and let a fresh process reopen and check. Collective; returns the exit status of this rank.

    It ends training, so that no rank waits for the first one, which checks.
    """
    trainer.evaluate()
    if trainer.is_world_process_zero():
        for measure in measures:
            print(held_out_summary(trainer, measure), flush=True)
    reference = save(trainer, output, sample)
    is_first, allowed = trainer.is_world_process_zero(), tolerance(trainer)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    if not is_first:
        return 0
    plot = plot_losses(trainer, output)
    status = check_export(output, reference, allowed)
    print(where_next(output) + (f"\nthe losses are drawn in {plot}" if plot else ""), flush=True)
    return status


def where_next(output: Path, resume: str = "--resume_from_checkpoint True (with --save_strategy steps)") -> str:
    """Where the files of a run are, and how to go on."""
    return (
        f"saved in {output}: open it with from_pretrained({str(output)!r})\n"
        f"go on from the last checkpoint: {resume}\n"
        f"other dtype or file size: dmuon-hf export {output} {output}-bf16 --dtype bfloat16"
    )
