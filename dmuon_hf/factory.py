"""Making a Muon optimizer for a model that Trainer or Accelerate will prepare.

`create()` is for `Trainer(optimizers=...)`: it returns a description, from which the Trainer builds the optimizer
when it has model and arguments. `create_optimizer()` builds one at once, for `accelerator.prepare(model, optimizer)`.

Building it gives each matrix its owner, on the mesh that accelerate has set up. `accelerator.prepare` then shards the
rest of the model and rebinds the optimizer to the result (`dmuon_hf.prepare`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

import dmuon_hf.core as dmuon
from dmuon_hf import checks
from dmuon_hf.adapters import trained_factors
from dmuon_hf.announcement import announce_at_first_step
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.runtime import Runtime, require_runtime, runtime_of
from dmuon_hf.launch import current_launch
from dmuon_hf.loaded_shards import check_synchronised_at_first_step, is_loaded_in_shards, selection_of
from dmuon_hf.options import DMuonOptions, options_of
from dmuon_hf.presets import muon_specs, routes
from dmuon_hf.qk_clip import clip_logits, sites_to_clip
from dmuon_hf.rates import Part, Rates, lowered
from dmuon_hf.schedules import scheduled_momentum, scheduled_weight_decay
from dmuon_hf.survey import Survey, survey

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import TrainingArguments

__all__ = ["DMuonOptimizers", "create", "create_optimizer", "is_description"]

SchedulerFactory = Callable[[torch.optim.Optimizer, int], "LRScheduler"]


class _Unbuilt:
    """Stands where an optimizer or scheduler would; any use means that nothing turned the description into one."""

    __slots__ = ("_role",)

    def __init__(self, role: str) -> None:
        object.__setattr__(self, "_role", role)

    def _fail(self) -> NoReturn:
        raise ConfigurationError(
            f"the {self._role} described by dmuon_hf.create() was never built. Pass create()'s result unchanged as "
            "Trainer(optimizers=dmuon_hf.create(...)); do not unpack it. In a training loop of your own use "
            "dmuon_hf.create_optimizer(model, ...)."
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._fail()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        self._fail()

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        self._fail()

    def __repr__(self) -> str:
        return f"<{self._role} of dmuon_hf.create(), not built>"


class DMuonOptimizers(tuple[Any, Any]):  # noqa: SLOT001 - a tuple with attributes cannot have slots
    """What `create` returns: a pair that only `Trainer(optimizers=...)` understands. Its elements raise on any use."""

    options: DMuonOptions
    scheduler: SchedulerFactory | None

    def __new__(cls, options: DMuonOptions, scheduler: SchedulerFactory | None) -> DMuonOptimizers:
        self = super().__new__(cls, (_Unbuilt("optimizer"), _Unbuilt("scheduler")))
        self.options = options
        self.scheduler = scheduler
        return self

    def __repr__(self) -> str:
        return f"dmuon_hf.create({self.options!r}, scheduler={self.scheduler!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.options, self.scheduler)


def is_description(value: object) -> bool:
    """Whether `value` came from `create()`: its result, one of its elements, or something that holds one of these."""
    if isinstance(value, (DMuonOptimizers, _Unbuilt)):
        return True
    return isinstance(value, (tuple, list)) and any(map(is_description, value))


def create(*, scheduler: SchedulerFactory | None = None, **options: Any) -> DMuonOptimizers:
    """Muon for a Trainer: `Trainer(model=model, args=args, ..., optimizers=dmuon_hf.create())`.

    Learning rate, weight decay, Adam betas and epsilon come from the Trainer's arguments, and so do the names that
    are not decayed and the scheduler. With the default `lr_scale`, the learning rate that suits AdamW suits Muon as
    well.

    Args:
        scheduler: `(optimizer, num_training_steps) -> LRScheduler`, instead of `lr_scheduler_type`.
        muon_lr, adamw_lr: learning rate of the Muon and of the AdamW weights; default `args.learning_rate`.
        embedding_lr, head_lr, scalar_lr: learning rates of AdamW weights by part; default `adamw_lr`. Embeddings, also
            where they are tied to the head; the output embedding and what the class for a task adds around the base
            model; norms, biases and other vectors elsewhere.
        param_groups: `{name or shell pattern: settings}`, or dicts with patterns in `"params"` and a `"group_name"`.
            Settings are `lr` (of all weights in it), `muon_lr`, `adamw_lr`, `lr_factor` (on the rates that hold
            otherwise), `weight_decay`, `muon_weight_decay`, `adamw_weight_decay` (of what is decayed), `momentum`,
            `nesterov`, `ns_steps`, `lr_scale`, `update_rule`, `normuon_beta2`, `betas`, `eps`. Of several entries that
            match, the last counts.
        muon_weight_decay: decoupled decay of the Muon weights; default `args.weight_decay`.
        momentum, nesterov, ns_steps, ns_backend: as in `dmuon_hf.core.Muon`, except that `ns_backend` is `"auto"` here:
            for each shape the form of Newton-Schulz that multiplies less.
        momentum_schedule: `step -> momentum`, steps counted from 0 and across resumes; or the fields of
            `dmuon_hf.MomentumWarmup` as a mapping.
        weight_decay_schedule: `step -> factor` on the weight decay of every group, steps counted as those of momentum;
            or the fields of `dmuon_hf.WeightDecayRamp` as a mapping.
        coefficients: of Newton-Schulz: `"polar_express"`, `"you"`, `"quintic"`, or `(a, b, c)` per step.
        lr_scale: how the learning rate depends on a matrix's shape: `"match_rms_adamw"`, `"original"`, `"spectral"` or
            `"none"`. All but the first need `muon_lr`.
        update_rule: `"muon"`, or `"normuon"` (arXiv 2510.05491), which brings the rows of an update to one size by
            their second moments; the learning rate is Muon's.
        normuon_beta2: decay of these second moments, 0.95 if left out.
        predicate: `(name, parameter) -> bool` choosing the Muon weights instead of the presets.
        routes: `{name or shell pattern: "muon" | "adamw"}`, exceptions to the presets or the predicate.
        layouts: `{name or shell pattern: MatrixSpec}`, the logical matrices of fused weights that the presets do not
            know or that are to be cut otherwise; instead of a `MatrixSpec` also `"whole"`, `"qkv"`, `"qkv_per_head"`,
            `"qkv_per_key_value_head"`, `"kv"`, `"gate_up"`, `"gate_up_alternating"` or `"query_gate_per_head"`.
        per_head: orthogonalise queries, keys and values head by head.
        lora: which factors of LoRA adapters Muon takes: `"adamw"` none, `"muon_b"` the factors B, `"muon"` both.
        replicate_async: under HSDP, publish updated weights while the next forward runs.
        qk_clip: the largest attention logit to allow, such as 100.0: after each step the weights of queries and keys of
            heads with a larger one are rescaled (MuonClip, arXiv 2507.20534). None does not look at logits.

    Raises:
        ConfigurationError: an unknown option, or options that contradict each other.
    """
    from dmuon_hf import hooks

    hooks.install()
    return DMuonOptimizers(options_of(options), scheduler)


def create_optimizer(
    model: nn.Module,
    args: TrainingArguments | None = None,
    *,
    lr: float | None = None,
    weight_decay: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    decay_names: Collection[str] | None = None,
    **options: Any,
) -> dmuon.Muon:
    """Dedicate `model` and build its optimizer.

    Collective: every rank calls it, after the Accelerator is made and before `accelerator.prepare(model, optimizer)`.
    A model that transformers sharded while it loaded it (`distributed_config=`) is trained as it is, without either.

    Args:
        model: the whole model, not yet sharded, or one loaded with `distributed_config=`.
        args: TrainingArguments that supply the values below which are not given.
        lr: learning rate of all weights, unless `muon_lr` or `adamw_lr` says otherwise. Needed without `args`.
        weight_decay: decoupled weight decay (default 0.0), for the parameters in `decay_names`.
        betas, eps: of AdamW; default `(0.9, 0.999)` and `1e-8`.
        decay_names: names of the parameters that are decayed; default: the Trainer's rule, all but biases and norms.
        options: as in `create`.

    Returns:
        A `dmuon_hf.core.Muon` with the parameter groups `decay/muon`, `decay/adamw`, `no_decay/muon` and
        `no_decay/adamw`, as far as there are such parameters. Those of a part or of an entry of `param_groups` are
        apart, with its name in front: `embedding/decay/adamw`, `vision/decay/muon`.

    Raises:
        ConfigurationError: no Muon matrix, quantised or already sharded model, contradictory options, attention that
            `qk_clip` cannot clip.
    """
    from dmuon_hf import hooks

    hooks.install()
    settings = options_of(options)
    checks.check_model(model)
    sites = [] if settings.qk_clip is None else sites_to_clip(survey(model))
    if args is not None:
        lr = _first(lr, args.learning_rate)
        weight_decay = _first(weight_decay, args.weight_decay)
        betas = _first(betas, (args.adam_beta1, args.adam_beta2))
        eps = _first(eps, args.adam_epsilon)
    if lr is None:
        raise ConfigurationError("create_optimizer needs lr= (or TrainingArguments as second argument)")
    in_place: dict[str, Any] = {}
    adapters_alone = False
    muon_names: Collection[str]
    if is_loaded_in_shards(model):
        muon_names = specs = _specs(survey(model), settings)
        checks.check_any_muon(model, specs)
        in_place, is_prepared_later = selection_of(model, specs), False
    else:
        # Under FSDP2 `prepare` shards the rest and rebinds the optimizer; until then its state would be whole.
        runtime, adapters_alone = _dedicate(model, settings)
        muon_names = {name for name, matrix in runtime.dedicated.items() if matrix.route == "muon"} | {*runtime.stacks}
        is_prepared_later = runtime.topology.is_distributed and not runtime.topology.keeps_whole
    rates = _rates(settings, lr, _first(weight_decay, 0.0))
    groups = lowered(
        model,
        rates,
        settings.rate_groups(),
        decay_names=_default_decay_names(model) if decay_names is None else decay_names,
        muon_names=muon_names,
        found=lambda: survey(model),
    )
    if adapters_alone:
        groups = [{**group, "dmuon_route": "adamw"} for group in groups]
    optimizer = dmuon.Muon(
        model,
        lr=rates.muon_lr,
        adamw_lr=rates.adamw_lr,
        momentum=settings.momentum_of()(0),
        nesterov=settings.nesterov,
        ns_steps=settings.ns_steps,
        ns_backend=settings.newton_schulz(),
        lr_scale=settings.lr_scale,
        update_rule=settings.update_rule,
        normuon_beta2=_first(settings.normuon_beta2, 0.95),
        adamw_betas=_first(betas, (0.9, 0.999)),
        adamw_eps=_first(eps, 1e-8),
        replicate_async=settings.replicate_async,
        defer_state=is_prepared_later,
        param_groups=groups,
        **in_place,
    )
    if settings.momentum_schedule is not None:
        scheduled_momentum(optimizer, settings.momentum_of())
    if settings.weight_decay_schedule is not None:
        scheduled_weight_decay(optimizer, settings.weight_decay_factor())
    if settings.qk_clip is not None:
        clip_logits(optimizer, sites, settings.qk_clip)
    if in_place:
        check_synchronised_at_first_step(model, optimizer)
    announce_at_first_step(model, optimizer)
    return optimizer


def _dedicate(model: nn.Module, options: DMuonOptions) -> tuple[Runtime, bool]:
    """Give the Muon weights their owners; a model that its user dedicated stays as it is.

    Where nothing else trains, adapters that are left to AdamW get owners too, and it is said that AdamW is to update
    them.
    """
    launch = current_launch()
    runtime = runtime_of(model)
    if runtime is not None:
        if any(value is not None for value in (options.predicate, options.routes, options.layouts)) or options.per_head:
            raise ConfigurationError(
                "the model already has dedicated parameters, so predicate=, routes=, layouts= and per_head= would have "
                "no effect: leave them out, or leave the dedication to this call"
            )
        return runtime, False
    launch.parallelize(model)
    found = survey(model, launch.block_classes)
    specs = _specs(found, options)
    adapters_alone = not specs and options.predicate is None and not options.routes
    if adapters_alone:
        specs = trained_factors(model)
    checks.check_any_muon(model, specs)
    launch.dedicate(found, specs)
    return require_runtime(model), adapters_alone


def _specs(found: Survey, options: DMuonOptions) -> dict[str, dmuon.MatrixSpec]:
    """Layout of every weight that Muon is to update, by canonical name."""
    table = routes(
        found.model,
        predicate=options.predicate,
        overrides=options.routes,
        layouts=options.layouts,
        per_head=options.per_head,
        lora=options.lora,
        found=found,
    )
    return muon_specs(table)


def _rates(options: DMuonOptions, lr: float, weight_decay: float) -> Rates:
    parts: dict[Part, float | None] = {
        "embedding": options.embedding_lr,
        "head": options.head_lr,
        "scalar": options.scalar_lr,
    }
    return Rates(
        muon_lr=_first(options.muon_lr, lr),
        adamw_lr=_first(options.adamw_lr, lr),
        muon_weight_decay=_first(options.muon_weight_decay, weight_decay),
        adamw_weight_decay=weight_decay,
        parts={part: rate for part, rate in parts.items() if rate is not None},
    )


def _default_decay_names(model: nn.Module) -> Collection[str]:
    """The Trainer's rule. Its method reads nothing of the Trainer, so it serves loops without one as well."""
    from transformers import Trainer

    return Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]


def _first(*candidates: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in candidates if value is not None), None)
