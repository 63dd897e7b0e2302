"""What the doctor says of packages and their ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from specdec.doctor import installation as doctor
from specdec.doctor.findings import Finding, Level

METADATA = """Metadata-Version: 2.4
Name: doctored
Version: 1.2.3
Requires-Python: >={python}
Requires-Dist: torch>=2
Requires-Dist: numpy<1
Requires-Dist: nowhere-to-be-found>=1.5
Requires-Dist: not-for-this-machine; sys_platform == 'another'
Provides-Extra: plots
Requires-Dist: also-nowhere; extra == 'plots'
Provides-Extra: full
Requires-Dist: pytest; extra == 'full'
Provides-Extra: old
Requires-Dist: pytest<1; extra == 'old'
"""


def by_subject(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Finding]]:
    """Installs a distribution "doctored" and examines it."""

    def examine(python: str) -> dict[str, Finding]:
        folder = tmp_path / "site" / "doctored-1.2.3.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(METADATA.format(python=python))
        monkeypatch.syspath_prepend(folder.parent)
        return by_subject(doctor.installation("doctored"))

    return examine


def test_packages_are_held_against_the_declared_ranges(install: Callable[..., dict[str, Finding]]) -> None:
    found = install("3.11")
    assert found["doctored"].fact == "1.2.3"
    assert found["python"].level == Level.OK
    assert found["torch"].level == Level.OK
    assert torch.__version__ in found["torch"].fact
    assert found["numpy"].level == Level.WARN
    assert found["numpy"].remedy == "pip install 'numpy<1'"
    assert found["nowhere-to-be-found"].level == Level.FAIL
    assert found["nowhere-to-be-found"].remedy == "pip install 'nowhere-to-be-found>=1.5'"
    assert "not-for-this-machine" not in found


def test_extras_say_what_they_lack(install: Callable[..., dict[str, Finding]]) -> None:
    found = install("3.11")
    assert found["[full]"] == Finding(Level.OK, "[full]", "complete")
    assert found["[plots]"].level == Level.OK, "what is optional may be absent"
    assert "also-nowhere" in found["[plots]"].fact
    assert "'.[plots]'" in found["[plots]"].remedy
    assert found["[old]"].level == Level.WARN, "what is there should be in range"
    assert "pytest" in found["[old]"].fact
    assert "<1" in found["[old]"].fact
    assert not {"pytest", "also-nowhere"} & found.keys(), "an extra's package is no requirement"


def test_a_python_out_of_range_fails(install: Callable[..., dict[str, Finding]]) -> None:
    found = install("3.99")["python"]
    assert found.level == Level.FAIL
    assert ">=3.99" in found.fact


def test_a_local_build_is_in_its_release_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "2.13.0+cpu")
    assert doctor.package(Requirement("torch>=2.11,<2.16")).level == Level.OK
    assert doctor.package(Requirement("torch>=2.11,<2.13")).level == Level.WARN


def test_a_checkout_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "distribution", absent)
    (found,) = doctor.installation()
    assert (found.level, found.subject) == (Level.WARN, "specdec-lab")
    assert "pip install -e ." in found.remedy
