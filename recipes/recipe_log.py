"""What a recipe says while it runs: one rank speaks, a line for each log entry, bars in a terminal only."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

import datasets
import transformers
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments

__all__ = ["announce", "quiet", "report"]


def quiet(is_main: bool) -> None:
    """One rank speaks: logs and progress bars of the others are left out, and bars where nobody watches them."""
    logging.basicConfig(level=logging.INFO if is_main else logging.ERROR, format="%(message)s")
    logging.getLogger("dmuon_hf.core").setLevel(logging.WARNING)
    # How accelerate takes its meshes, and what some models return: nothing that a user of a recipe could change.
    warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    if not (is_main and sys.stderr.isatty()):
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()


def announce(args: TrainingArguments, what: str, tokens: int | None = None) -> None:
    """Say on one rank, before anything slow, what will happen. `tokens`: of a sequence, where all have as many."""
    if args.process_index:
        return
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    length = f"{args.max_steps} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs in steps"
    rows = f"{batch} x {tokens} tokens" if tokens else f"{batch} rows"
    print(
        f"{what}: {length} of {rows} on {args.world_size} process(es), results in {args.output_dir}; how long it takes "
        "is said after the second step",
        flush=True,
    )


def report(trainer: Trainer) -> None:
    """Let the lines of this module take the place of the bars and dictionaries that a Trainer prints."""
    for theirs in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(theirs)
    trainer.add_callback(_Lines())


class _Lines(TrainerCallback):
    """A line for each log entry, and how long the rest takes, once a step was made that set nothing up any more."""

    def __init__(self) -> None:
        self._started = self._took = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer on every rank."""
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer on every rank."""
        self._took = time.perf_counter() - self._started
        if state.is_world_process_zero and state.global_step == 2 < state.max_steps and not control.should_log:
            print(self._to_go(state), flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
        """Called by the Trainer on every rank."""
        if not state.is_world_process_zero:
            return
        if "loss" in logs:
            line = f"step {state.global_step} of {state.max_steps}: {_figures(logs)}"
            print(f"{line}; {self._to_go(state)}" if 2 <= state.global_step < state.max_steps else line, flush=True)
        elif "eval_loss" in logs:
            print(f"held-out loss after step {state.global_step}: {logs['eval_loss']:.4f}", flush=True)

    def _to_go(self, state: Any) -> str:
        minutes = self._took * (state.max_steps - state.global_step) / 60
        return f"a step takes {self._took:.1f} s: about {minutes:.1f} min to go"


def _figures(logs: Mapping[str, Any]) -> str:
    """The figures of the whole model; those of single groups are in `trainer_state.json` and the user's tracker."""
    figures = {"loss": "loss {:.4f}", "grad_norm": "gradient norm {:.3g}", "learning_rate": "learning rate {:.3g}"}
    return ", ".join(form.format(logs[key]) for key, form in figures.items() if key in logs)
