"""Every hook into accelerate and transformers.

| Hooked                                  | Range                  | What it adds                                      |
|-----------------------------------------|------------------------|---------------------------------------------------|
| `PartialState.__init__`                 | accelerate >=1.15,<2   | FSDP processes on a machine without accelerators  |
| `AcceleratorState.__init__`             | accelerate >=1.15,<2   | FSDP2 on CPU is FSDP2, not DDP                    |
| `Accelerator.prepare`                   | accelerate >=1.15,<2   | launch checks; a second prepare of the same model |
| `Accelerator._prepare_tp`               | accelerate >=1.15,<2   | what was cut before it got owners stays as it is  |
| `Accelerator._prepare_fsdp2`            | accelerate >=1.15,<2   | dedicated weights stay out; the optimizer rebinds |
| `Accelerator.get_state_dict`            | accelerate >=1.15,<2   | finished tensors, tied names                      |
| `accelerator.load_fsdp_model`           | accelerate >=1.15,<2   | weights that any mode saved                       |
| `accelerator.load_fsdp_optimizer`       | accelerate >=1.15,<2   | optimizer state that any mode saved               |
| `accelerator.load_accelerator_state`    | accelerate >=1.15,<2   | both, in one process and under DDP                |
| `Accelerator.save_state`                | accelerate >=1.15,<2   | names and whole momentum, without FSDP            |
| `PreTrainedModel.save_pretrained`       | transformers >=5.20,<6 | refuses what is spread over ranks                 |
| `PreTrainedModel.push_to_hub`           | transformers >=5.20,<6 | the same                                          |
| `AttentionInterface.get_interface`      | transformers >=5.20,<6 | sees attention logits while `qk_clip` watches     |
| `Trainer.__init__`                      | transformers >=5.20,<6 | `optimizers=dmuon_hf.create(...)`                 |
| `Trainer.create_scheduler`              | transformers >=5.20,<6 | `create(scheduler=...)`                           |
| `Trainer.train`                         | transformers >=5.20,<6 | resuming passes by checkpoints that are cut off   |
| `Trainer.save_model`                    | transformers >=5.20,<6 | a whole model under `SHARDED_STATE_DICT` too      |
| `Trainer._load_from_checkpoint`         | transformers >=5.20,<6 | weights that any mode saved                       |
| `Trainer._load_best_model`              | transformers >=5.20,<6 | the same                                          |
| `Trainer._load_optimizer_and_scheduler` | transformers >=5.20,<6 | optimizer state that any mode saved, never none   |
| `Trainer._save_optimizer_and_scheduler` | transformers >=5.20,<6 | names and whole momentum, without FSDP            |
| `Trainer._prepare_for_training`         | transformers >=5.20,<6 | checks that it was loaded                         |
| `Trainer._get_grad_norm`                | transformers >=5.20,<6 | notes rates and norms of the groups               |
| `Trainer._maybe_log_save_evaluate`      | transformers >=5.20,<6 | makes the entry of the groups                     |
| `Trainer.log`                           | transformers >=5.20,<6 | adds it to that of the step                       |

`compat.SUPPORTED` holds the ranges and `install()` enforces them. Each hook calls the original unchanged when no
DMuon optimizer, model or plugin is involved; the two state hooks act only where FSDP2 was asked for on CPU, which
accelerate alone would quietly run as something else. `uninstall()` puts the originals back.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmuon_hf.compat import check_versions
from dmuon_hf.core.errors import DMuonError

__all__ = ["install", "installed", "uninstall"]

logger = logging.getLogger(__name__)

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Hook:
    """Replacement of `method` of `cls` in `module` by `wrapper` (`module:function`, taking `(original, self, ...)`).

    Without `cls` it is a function of the module, with its first argument in the place of `self`.
    """

    module: str
    cls: str | None
    method: str
    wrapper: str

    def target(self) -> Any:
        """The class or module that is hooked."""
        module = importlib.import_module(self.module)
        return module if self.cls is None else getattr(module, self.cls)

    def wrap(self, original: Method) -> Method:
        """`original` with the wrapper in front of it."""
        module, _, function = self.wrapper.partition(":")
        wrapper: Method = getattr(importlib.import_module(module), function)

        @functools.wraps(original)
        def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapper(original, self, *args, **kwargs)

        return hooked


_HOOKS: tuple[Hook, ...] = (
    Hook("accelerate.state", "PartialState", "__init__", "dmuon_hf.cpu_fsdp:partial_state_init"),
    Hook("accelerate.state", "AcceleratorState", "__init__", "dmuon_hf.cpu_fsdp:accelerator_state_init"),
    Hook("accelerate", "Accelerator", "prepare", "dmuon_hf.prepare:prepare"),
    Hook("accelerate", "Accelerator", "_prepare_tp", "dmuon_hf.tensor_parallel:prepare_tp"),
    Hook("accelerate", "Accelerator", "_prepare_fsdp2", "dmuon_hf.prepare:prepare_fsdp2"),
    Hook("accelerate", "Accelerator", "get_state_dict", "dmuon_hf.prepare:get_state_dict"),
    Hook("accelerate.accelerator", None, "load_fsdp_model", "dmuon_hf.accelerate_resume:load_fsdp_model"),
    Hook("accelerate.accelerator", None, "load_fsdp_optimizer", "dmuon_hf.accelerate_resume:load_fsdp_optimizer"),
    Hook("accelerate.accelerator", None, "load_accelerator_state", "dmuon_hf.accelerate_resume:load_accelerator_state"),
    Hook("accelerate", "Accelerator", "save_state", "dmuon_hf.accelerate_resume:save_state"),
    Hook("transformers", "PreTrainedModel", "save_pretrained", "dmuon_hf.saving:save_pretrained"),
    Hook("transformers", "PreTrainedModel", "push_to_hub", "dmuon_hf.saving:push_to_hub"),
    Hook(
        "transformers.modeling_utils", "AttentionInterface", "get_interface", "dmuon_hf.attention_logits:get_interface"
    ),
    Hook("transformers", "Trainer", "__init__", "dmuon_hf.trainer:trainer_init"),
    Hook("transformers", "Trainer", "create_scheduler", "dmuon_hf.trainer:create_scheduler"),
    Hook("transformers", "Trainer", "train", "dmuon_hf.trainer_resume:train"),
    Hook("transformers", "Trainer", "save_model", "dmuon_hf.trainer:save_model"),
    Hook("transformers", "Trainer", "_load_from_checkpoint", "dmuon_hf.trainer_resume:load_from_checkpoint"),
    Hook("transformers", "Trainer", "_load_best_model", "dmuon_hf.trainer_resume:load_best_model"),
    Hook(
        "transformers",
        "Trainer",
        "_load_optimizer_and_scheduler",
        "dmuon_hf.trainer_resume:load_optimizer_and_scheduler",
    ),
    Hook(
        "transformers",
        "Trainer",
        "_save_optimizer_and_scheduler",
        "dmuon_hf.trainer_resume:save_optimizer_and_scheduler",
    ),
    Hook("transformers", "Trainer", "_prepare_for_training", "dmuon_hf.trainer_resume:prepare_for_training"),
    Hook("transformers", "Trainer", "_get_grad_norm", "dmuon_hf.logs:get_grad_norm"),
    Hook("transformers", "Trainer", "_maybe_log_save_evaluate", "dmuon_hf.logs:maybe_log_save_evaluate"),
    Hook("transformers", "Trainer", "log", "dmuon_hf.logs:log"),
)

# Installed hooks with the method each replaced and the method it put there.
_active: dict[Hook, tuple[Method, Method]] = {}


def install() -> None:
    """Install all hooks; safe to call again. Raises `ConfigurationError` for untested versions."""
    if _active:
        return
    check_versions()
    for hook in _HOOKS:
        cls = hook.target()
        original = getattr(cls, hook.method)
        replacement = hook.wrap(original)
        setattr(cls, hook.method, replacement)
        _active[hook] = (original, replacement)
    logger.debug("installed %d hooks", len(_active))


def uninstall() -> None:
    """Put every original method back; safe to call again.

    Raises:
        DMuonError: another library hooked the same method after us; nothing is changed then, since putting our original
            back would drop its hook.
    """
    for hook, (_, replacement) in _active.items():
        if getattr(hook.target(), hook.method) is not replacement:
            raise DMuonError(
                f"{hook.cls or hook.module}.{hook.method} was replaced again after dmuon_hf hooked it; undo that "
                "replacement first"
            )
    for hook, (original, _) in _active.items():
        setattr(hook.target(), hook.method, original)
    _active.clear()


def installed() -> bool:
    """Whether the hooks are in place."""
    return bool(_active)
