"""The plan: which parameters are dedicated, their logical matrices, and which rank owns each.

Pure and frozen. Nothing here communicates or touches parameter values: the same inputs give the same plan on every
rank, which the ranks confirm by comparing `Plan.digest()`.
"""

from __future__ import annotations

from dmuon_hf.core.plan.bounds import least_possible_load
from dmuon_hf.core.plan.cost import CostModel, LinkCosts, matrix_cost, newton_schulz_flops, sharing_is_cheaper
from dmuon_hf.core.plan.matrices import MatrixSpec, stored_matrices
from dmuon_hf.core.plan.names import canonical_name
from dmuon_hf.core.plan.partition import OwnerStrategy, Slot, WorkItem, assign_owners, imbalance
from dmuon_hf.core.plan.plan import SHARDED, Candidate, ParamEntry, Plan, make_plan

__all__ = [
    "SHARDED",
    "Candidate",
    "CostModel",
    "LinkCosts",
    "MatrixSpec",
    "OwnerStrategy",
    "ParamEntry",
    "Plan",
    "Slot",
    "WorkItem",
    "assign_owners",
    "canonical_name",
    "imbalance",
    "least_possible_load",
    "make_plan",
    "matrix_cost",
    "newton_schulz_flops",
    "sharing_is_cheaper",
    "stored_matrices",
]
