"""Prompts: ten workloads written for this project, the user's own in the same format, and any dataset."""

from specdec.workloads.base import TIERS, Workload
from specdec.workloads.builtin import load_workload, workload_names
from specdec.workloads.dataset import load_dataset

__all__ = ["TIERS", "Workload", "load_dataset", "load_workload", "workload_names"]
