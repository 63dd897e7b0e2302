"""Conformance kits for other people's drafters, verifiers and controllers, as scikit-learn's check_estimator is one.

`check_drafter`, `check_verifier` and `check_controller` each raise `ConformanceError` at the first rule of a contract
that is broken, and else return a `Report` of what was checked and what was not and why; so does `check_device`, which
asks whether parts would run on a GPU. `tiny_target` is the model they decode with.
"""

from specdec.testing.controllers import check_controller
from specdec.testing.device import check_device
from specdec.testing.drafters import check_drafter
from specdec.testing.report import ConformanceError, Report
from specdec.testing.tiny import tiny_target
from specdec.testing.verifiers import check_verifier

__all__ = [
    "ConformanceError",
    "Report",
    "check_controller",
    "check_device",
    "check_drafter",
    "check_verifier",
    "tiny_target",
]
