"""Prompts: ten workloads written for this project, and the user's own in the same format."""

from specdec.workloads.base import TIERS, Workload
from specdec.workloads.builtin import load_workload, workload_names

__all__ = ["TIERS", "Workload", "load_workload", "workload_names"]
