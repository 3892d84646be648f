"""``Muon``: one flat ``torch.optim.Optimizer`` for dedicated matrices and everything else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dmuon_hf.core.checkpoint.reading import guard_loads
from dmuon_hf.core.environment import switch
from dmuon_hf.core.errors import ConfigurationError
from dmuon_hf.core.ns import NewtonSchulz
from dmuon_hf.core.ns.agreement import require_same_on_all_ranks
from dmuon_hf.core.optim.binding import check_equal_start, check_rebindable, check_replicas, debug_enabled
from dmuon_hf.core.optim.bound import BoundModel
from dmuon_hf.core.optim.clip_global import MuonGradClipStats, MuonGradClipStrategy, clip_grad_norm_
from dmuon_hf.core.optim.columns import ColumnPolicy, require_gram
from dmuon_hf.core.optim.groups import Defaults, changed_update_rule, forced_routes, materialised
from dmuon_hf.core.optim.interfaces import MatrixSource, OptimizerRuntime
from dmuon_hf.core.optim.normuon import UpdateRule
from dmuon_hf.core.optim.profile import StepProfile
from dmuon_hf.core.optim.progress import FirstStepProgress
from dmuon_hf.core.optim.scaling import LrScale
from dmuon_hf.core.optim.schedules import schedule_defaults, take_cycled_momentum
from dmuon_hf.core.optim.selection import Selection
from dmuon_hf.core.optim.stages import AgreementGroup, Stages
from dmuon_hf.core.optim.state import PARAM_NAMES, check_loadable, follow_parameters, restore_state
from dmuon_hf.core.optim.step import local_grads, muon_rules, step_adamw
from dmuon_hf.core.optim.verdict import agree_on_step
from dmuon_hf.core.selection import MatrixSpecFn, Predicate

__all__ = ["Muon"]

logger = logging.getLogger(__name__)


class Muon(Optimizer):
    """Muon for dedicated matrices, AdamW for every other trainable parameter, as one optimizer.

    Build it after ``dedicate_params`` and ``fully_shard``. The update of a matrix is computed by its owner alone, on
    the gradient that is complete when ``backward()`` returns; it does not depend on the topology. All ranks construct
    it and call ``step``, ``zero_grad`` and ``clip_grad_norm_`` together.

    Each group of ``param_groups`` has ``lr``, ``weight_decay``, ``group_name`` and ``route``. Route ``"muon"`` adds
    ``momentum``, ``nesterov``, ``ns_steps``, ``lr_scale``, ``update_rule``, ``normuon_beta2`` and keeps
    ``momentum_buffer`` in fp32, with the update rule ``"normuon"`` also ``second_moment``, one value for each row;
    route ``"adamw"`` adds ``betas``, ``eps`` and keeps the state of ``torch.optim.AdamW``. The learning rate of a muon
    group is multiplied by the factor of ``lr_scale`` for the shape of each logical matrix. Nothing else is read by
    ``step``, so schedulers, and callers that change or swap groups, work as with any optimizer. ``defaults`` holds
    ``lr``, ``momentum`` and ``weight_decay`` of the muon route: a schedule with one absolute bound bounds the Muon rate
    and keeps the ratio of the others to it, and one that cycles momentum cycles ``momentum`` and ``betas[0]``.

    A step is skipped on all ranks, weights and state untouched, when any gradient on any rank is infinite or NaN; it is
    counted in ``skipped_steps``. A matrix that no rank saw a gradient for is left alone: no decay, no momentum decay.
    Works under ``torch.amp.GradScaler``.

    Args:
        model: Model with dedicated parameters.
        lr: Learning rate of dedicated matrices.
        momentum: Momentum coefficient ``mu`` of ``buf = mu * buf + g``.
        weight_decay: Decoupled decay of dedicated matrices, ``w *= 1 - lr * weight_decay``.
        ns_steps: Newton-Schulz iterations: that many rows of the coefficients of ``ns_backend``, the last repeated
            beyond their end.
        adamw_lr: Learning rate of all other parameters.
        adamw_betas: AdamW betas.
        adamw_weight_decay: AdamW weight decay.
        adamw_eps: AdamW epsilon.
        param_groups: Semantic groups, each with ``params`` and optionally ``group_name``, ``lr``, ``weight_decay`` (for
            both routes), ``muon_lr``, ``muon_weight_decay``, ``momentum``, ``nesterov``, ``ns_steps``, ``lr_scale``,
            ``update_rule``, ``normuon_beta2``, ``adamw_lr``, ``adamw_weight_decay``, ``adamw_betas``, ``adamw_eps``;
            other keys are kept. Every trainable parameter is in exactly one; a frozen one may be in the one that it is
            to join when it is unfrozen. ``dmuon_route``, ``dmuon_optimizer`` or ``matrix_optimizer``, ``"muon"`` or
            ``"adamw"``, puts the dedicated parameters of a group on that route, whatever the policy of
            ``dedicate_params`` says. Who has an owner keeps it, and who has none gets none: ``"sharded_adamw"`` there
            can but confirm the policy. Each becomes ``<name>/muon`` and ``<name>/adamw``, made where any of it trains.
        ns_backend: ``"gram"``, ``"direct"``, ``"auto"`` or a ``NewtonSchulz``.
        nesterov: Whether Newton-Schulz sees ``g + mu * buf`` instead of ``buf``.
        replicate_async: HSDP: publish updated weights while the next forward starts, instead of inside ``step``. With
            one replica nothing is published.
        record_step_profile: Time the phases of each step; see :meth:`consume_last_step_profile`.
        group_prepare_ahead: Changes nothing: gradients are complete when ``backward()`` returns.
        tp_distributed_gram: Orthogonalise tensor-parallel matrices whose long side is cut where their parts lie: Gram
            matrices travel instead of directions and updates, and every rank of the axis computes. Needs the Gram form
            of Newton-Schulz.
        tp_distributed_gram_policy: ``"beneficial"`` takes those whose Gram matrices are small beside their updates,
            ``"always"`` all whose long side is cut.
        tp_distributed_gram_max_factor_to_scatter_ratio: Largest ratio, for ``"beneficial"``, of the bytes of the Gram
            matrices, in fp32, one for each segment between restarts, to those of one whole update.
        post_step_prefetch_groups: Hook boundaries, the first of the next forward, whose gathers are issued at the end
            of ``step``, so that they travel while the next batch is loaded; their whole weights take memory from then
            on.
        post_step_prefetch_sharded_adamw: Issue the gathers of all parameters on the route ``"sharded_adamw"`` at the
            end of ``step``, and not when the forward comes to them; they take their whole memory from then on.
        sharded_adamw_unshard_separate_stream: Copy these parameters and wait for their gathers on a side stream of
            their own, so that a gather of matrices behind a large one need not wait for what comes after it there. No
            further communicator. Changes nothing on a CPU.
        forward_prefetch_depth: Units gathered ahead of the one that runs; nothing is gathered in one process.
        first_step_progress_log: Log the matrices of the first step on their owners.
        first_step_progress_log_limit: Most of these messages per rank.
        lr_scale: ``"match_rms_adamw"`` (``0.2 * sqrt(max(out, in))``), ``"original"`` (``sqrt(max(1, out / in))``),
            ``"spectral"`` (``sqrt(out / in)``) or ``"none"``; ``convert_lr`` translates between them.
        update_rule: ``"muon"``, or ``"normuon"`` (arXiv 2510.05491), which divides each row of an orthogonalised matrix
            by the root of its second moment and gives the whole its norm back, so that ``lr`` and ``lr_scale`` mean the
            same. Fixed at construction. See :mod:`dmuon_hf.core.optim.normuon`.
        normuon_beta2: Decay of these second moments.
        defer_state: Make the state in ``rebind`` or the first ``step``, for a model that is yet to be sharded: the
            state of whole embeddings would be large, and thrown away.
        predicate: ``(name, param) -> bool``, with canonical names: which of the parameters that are not dedicated Muon
            updates where they are, DTensors of any layout as well as plain ones, ``(out, in)`` or stacks
            ``(count, out, in)``.
        matrix_spec_fn: ``(name, param) -> MatrixSpec | None``: how those decompose into logical matrices, in a stack
            each member; ``None`` is one whole matrix.
        agreement_group: Process group or mesh that joins the stages of a pipeline: a step is then skipped on all of
            them, and clipped by the norm over all. The pipeline dimension of a mesh will do, or the whole mesh. Every
            rank of it builds a ``Muon`` with it. By default each stage, as any model, decides with its own ranks.

    Raises:
        ConfigurationError: No dedicated matrix, an argument out of range, or ``param_groups`` that do not fit the
            model.
        NotImplementedError: An argument asks for a mode that is not built.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        adamw_lr: float | Tensor = 0.001,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_weight_decay: float = 0.01,
        adamw_eps: float = 1e-08,
        param_groups: Iterable[Mapping[str, Any]] | None = None,
        ns_backend: Literal["gram", "direct", "auto"] | NewtonSchulz = "gram",
        nesterov: bool = True,
        replicate_async: bool = True,
        record_step_profile: bool = False,
        group_prepare_ahead: bool = True,
        tp_distributed_gram: bool = False,
        tp_distributed_gram_policy: str = "beneficial",
        tp_distributed_gram_max_factor_to_scatter_ratio: float = 0.5,
        post_step_prefetch_groups: int = 0,
        post_step_prefetch_sharded_adamw: bool = False,
        sharded_adamw_unshard_separate_stream: bool = False,
        forward_prefetch_depth: int = 1,
        first_step_progress_log: bool = True,
        first_step_progress_log_limit: int = 8,
        *,
        lr_scale: LrScale = "match_rms_adamw",
        update_rule: UpdateRule = "muon",
        normuon_beta2: float = 0.95,
        defer_state: bool = False,
        predicate: Predicate | None = None,
        matrix_spec_fn: MatrixSpecFn | None = None,
        agreement_group: AgreementGroup | None = None,
    ) -> None:
        defaults = Defaults(
            muon={
                "lr": lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_steps": ns_steps,
                "weight_decay": weight_decay,
                "lr_scale": lr_scale,
                "update_rule": update_rule,
                "normuon_beta2": normuon_beta2,
            },
            adamw={"lr": adamw_lr, "betas": adamw_betas, "eps": adamw_eps, "weight_decay": adamw_weight_decay},
        )
        user_groups = None if param_groups is None else materialised(param_groups)
        columns = ColumnPolicy(tp_distributed_gram_policy, tp_distributed_gram_max_factor_to_scatter_ratio)
        self._selection = Selection(
            predicate, matrix_spec_fn, forced_routes(model, user_groups), columns if tp_distributed_gram else None
        )
        self._bound = BoundModel(model, self._selection)
        self._orthogonalize = NewtonSchulz(ns_backend) if isinstance(ns_backend, str) else ns_backend
        if tp_distributed_gram and self.runtime.topology.tensor is not None:
            require_gram(self._orthogonalize)
        if isinstance(self._orthogonalize, NewtonSchulz):
            require_same_on_all_ranks(self._orthogonalize, self._bound.ranks)
        self.stages = Stages(agreement_group, self.runtime)
        """Agreement with the ranks of ``agreement_group``."""
        self._replicate_async = replicate_async
        self._forward_prefetch_depth = forward_prefetch_depth
        if post_step_prefetch_groups < 0:
            raise ConfigurationError(f"post_step_prefetch_groups must be 0 or more, got {post_step_prefetch_groups}")
        self._prefetch_groups = post_step_prefetch_groups
        self._prefetch_sharded = post_step_prefetch_sharded_adamw
        self._separate_row_stream = sharded_adamw_unshard_separate_stream
        self._profile = StepProfile(record_step_profile)
        self._fences = switch("DMUON_ISOLATED_PG_BARRIER")
        self._progress = FirstStepProgress(first_step_progress_log_limit if first_step_progress_log else 0)
        self._is_ready = self._is_compared = False
        self.skipped_steps = 0
        """Steps that all ranks skipped because a gradient was infinite or NaN."""
        self.ns_matrices = 0
        """Logical matrices orthogonalised on this rank so far."""
        self.last_muon_grad_clip_stats: MuonGradClipStats | None = None
        """Statistics of the most recent ``clip_grad_norm_``."""
        lowered = self._bound.lower(user_groups, defaults)
        self._names = [group.names for group in lowered]
        self._waiting = [group.waiting for group in lowered]
        self._binding = self._bound.binding(self._waiting)
        super().__init__(
            [group.as_param_group() for group in lowered],
            schedule_defaults(lr=lr, momentum=momentum, weight_decay=weight_decay),
        )
        self._update_rules = [group.get("update_rule") for group in self.param_groups]
        self._bound.autotune(self._orthogonalize, self.param_groups)
        if not defer_state:
            self._reset_state()
        self._configure_runtime()
        guard_loads(self)
        if debug_enabled() and self.runtime.dedicated:
            self.register_step_post_hook(lambda *_: check_replicas(self._bound.model))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are fixed at construction, where each parameter gets its route.

        Raises:
            ConfigurationError: Called by a user; pass ``param_groups`` to the constructor instead.
        """
        if "route" not in param_group:
            raise ConfigurationError("Muon's groups are fixed at construction: pass them as Muon(param_groups=...)")
        super().add_param_group(param_group)
        if param_group["route"] == "adamw":
            # From the defaults, which are those of the muon route.
            del param_group["momentum"]

    def rebind(self, model: nn.Module) -> None:
        """Point every group at the current parameters of ``model``, by canonical name, with fresh state.

        For a model that was sharded or dedicated anew after the optimizer was built. Hyperparameters stay. All ranks
        call it.

        Raises:
            ConfigurationError: A parameter of a group is gone or changed its route, or a trainable one is in no group;
                the names are listed and nothing is changed.
        """
        bound = BoundModel(model, self._selection)
        by_name, on_muon = bound.trainable()
        check_rebindable(self.param_groups, self._names, by_name, on_muon)
        self._bound = bound
        self.stages.follow(bound.runtime)
        self._binding = bound.binding(self._waiting)
        for group, names in zip(self.param_groups, self._names, strict=True):
            group["params"] = [by_name[name] for name in names]
        bound.autotune(self._orthogonalize, self.param_groups)
        self._reset_state()
        self._is_ready = self._is_compared = False
        self._configure_runtime()

    def _reset_state(self) -> None:
        self.state.clear()
        self._bound.add_state(self.state, self.param_groups)

    def _configure_runtime(self) -> None:
        self.runtime.set_forward_prefetch_depth(self._forward_prefetch_depth)
        self.runtime.separate_row_stream(self._separate_row_stream)

    # -- state dicts -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State and hyperparameters, as ``torch.optim.Optimizer.state_dict``, and ``"param_names"`` of each group.

        torch keys state by place in the groups: the names tell a load whether they are the same places.
        """
        take_cycled_momentum(self.param_groups)
        return {**super().state_dict(), PARAM_NAMES: [list(names) for names in self._names]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and hyperparameters; that of matrices keeps fp32. See ``torch.optim.Optimizer.load_state_dict``.

        Raises:
            ConfigurationError: The groups differ, or state is missing or misshapen; nothing is changed.
        """
        bound = self._bound
        normalised = bound.normalised(self.param_groups)
        check_loadable(self.param_groups, self._names, state_dict, bound.state_layouts(), normalised)
        take_cycled_momentum(self.param_groups)
        before, state_before = self.param_groups, self.state
        super().load_state_dict(state_dict)
        for group, old in zip(self.param_groups, before, strict=True):
            for key, value in old.items():
                group.setdefault(key, value)
        restore_state(self.param_groups, self.state, state_dict, state_before, bound.state_dtypes())

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("Muon is bound to a model on this rank and cannot be copied or pickled: save its state_dict()")

    # -- step --------------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, accumulated and in flight; all ranks call it together.

        That includes what FSDP2 keeps of passes under ``no_sync``, or of one that an exception ended, which the
        ``zero_grad`` of other optimizers leaves for the next step.

        ``set_to_none=False`` zeroes the gradients of the adamw route instead. Those of matrices are dropped always: a
        zero gradient would count as one, and decay the momentum.
        """
        for param in self._bound.muon_params:
            param.grad = None
        super().zero_grad(set_to_none=set_to_none)
        self.runtime.discard_grads()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Collective: all data-parallel ranks call it together.

        Args:
            closure: Evaluates the model again and returns the loss, with gradients enabled.

        Returns:
            What ``closure`` returned, or ``None``.

        Raises:
            LockstepError: The ranks have run different numbers of backward passes since ``zero_grad``.
            ConfigurationError: The update rule of a group was changed, the groups of some rank do not hold the model's
                current parameters, or no rank synchronises one of them. On every rank, with the weights as they were.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        bound, runtime = self._bound, self.runtime
        self._profile.begin(runtime.topology.device)
        with self._profile.phase("prepare"):
            runtime.prepare_grads()
            changed = changed_update_rule(self.param_groups, self._update_rules)
            findings = self._binding.inspect(self.param_groups, self._names, changed)
            if findings.is_sound:
                self._make_ready(findings.joined)
        # Attributes that torch.amp.GradScaler sets for the time of the call.
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        with torch.profiler.record_function("dmuon::agreement"), self._profile.phase("agreement"):
            verdict = agree_on_step(
                runtime,
                self.stages,
                [bound.managed.flags(), *(source.flags() for source in bound.sources)],
                local_grads(self.param_groups),
                findings,
                grad_scale=grad_scale,
                found_inf=found_inf,
            )
        if not verdict.sound:
            self._binding.explain()
        if not self._is_compared:
            check_equal_start(runtime, bound.model)
            self._is_compared = True
        if verdict.finite:
            self._update(verdict.reached)
        else:
            self._count_skip()
        if self._fences:
            runtime.fence()
        return loss

    def _update(self, reached: Sequence[Sequence[bool]]) -> None:
        """Update what the ranks have agreed on and send it on its way. Collective."""
        bound, phase = self._bound, self._profile.phase
        take_cycled_momentum(self.param_groups)
        managed, *in_sources = reached
        with phase("adamw"):
            bound.managed.update(self.param_groups, self.state, managed)
        with phase("muon"):
            self._update_matrices(in_sources)
        with phase("adamw"):
            for group in self.param_groups:
                if group["route"] == "adamw":
                    step_adamw(group, self.state, [p for p in group["params"] if id(p) not in bound.managed.ids])
        with phase("publish"):
            if not self._replicate_async:
                bound.runtime.finish_publish()
            if self._prefetch_groups:
                bound.runtime.prefetch_first(self._prefetch_groups)
            if self._prefetch_sharded:
                bound.runtime.prefetch_sharded()

    def _update_matrices(self, reached: Sequence[Sequence[bool]]) -> None:
        rules = muon_rules(self.param_groups)
        on_batch = self._progress.on_batch if self._progress.active else None
        for source, flags in zip(self._bound.sources, reached, strict=True):
            self.ns_matrices += source.update(rules, self.state, flags, self._orthogonalize, on_batch=on_batch)
        self._progress.finish()

    def consume_last_step_profile(self) -> dict[str, float] | None:
        """Milliseconds of the phases of the last step.

        ``prepare_ms``, ``agreement_ms``, ``muon_ms``, ``adamw_ms``, ``publish_ms`` and ``total_ms``.

        Each step's are given once; ``None`` after that, before the first step, and without ``record_step_profile``. On
        an accelerator they are times of its stream, and the host waits for it here. Of a step that was skipped the
        phases after the agreement are zero. Local to the rank.
        """
        return self._profile.consume()

    def _make_ready(self, joined: Sequence[nn.Parameter]) -> None:
        """Make state for parameters that have ``joined`` a group, and for all where that was put off."""
        if not self._is_ready and not self.state:
            self._reset_state()
        elif joined:
            self._bound.add_state(self.state, self.param_groups, only={id(param) for param in joined})
        if self._is_ready:
            return
        self._is_ready = True
        follow_parameters(self.state)
        self._bound.warn_of_narrow_matrices()

    def _count_skip(self) -> None:
        self.skipped_steps += 1
        if self._bound.is_first:
            logger.warning(
                "a gradient was infinite or NaN on some rank: this step is skipped on all ranks (%d skipped so far)",
                self.skipped_steps,
            )

    # -- clip --------------------------------------------------------------------------------------------------------

    @property
    def runtime(self) -> OptimizerRuntime:
        """The runtime of the model this optimizer belongs to."""
        return self._bound.runtime

    @property
    def newton_schulz(self) -> NewtonSchulz:
        """What orthogonalises."""
        return self._orthogonalize

    @property
    def sources(self) -> tuple[MatrixSource, ...]:
        """Where the matrices of the muon route are."""
        return self._bound.sources

    def matrix_gradients(self) -> dict[str, Tensor]:
        """Live gradients of the matrices that this rank holds some of, by canonical name; without those that have none.

        A DTensor lies on other ranks too; a plain one is this rank's alone.
        """
        return {name: grad for source in self.sources for name, grad in source.gradients().items()}

    def norm_over_stages(self, norm: Tensor, norm_type: float = 2.0) -> Tensor:
        """The norm over all stages of ``agreement_group``, from that over this one. Collective over the group.

        For torch's own clipping, of every parameter::

            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, optimizer.norm_over_stages(norm))

        Args:
            norm: Of some gradients of the model, equal on all its ranks; a DTensor too, as torch gives it.
            norm_type: ``p`` of the norm, or infinity.
        """
        return self.stages.norm(norm, norm_type)

    def clip_grad_norm_(
        self,
        max_norm: float | None,
        *,
        norm_type: float | None = None,
        error_if_nonfinite: bool | None = None,
        foreach: bool | None = None,
        strategy: str | MuonGradClipStrategy | None = None,
    ) -> MuonGradClipStats:
        """Clip the gradients of matrices only; ``None`` stands for the default of ``clip_grad_norm_``."""
        return clip_grad_norm_(
            self,
            max_norm,
            norm_type=2.0 if norm_type is None else norm_type,
            error_if_nonfinite=bool(error_if_nonfinite),
            foreach=foreach,
            strategy="global_norm" if strategy is None else strategy,
        )
