"""What is installed: Python and every package."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from typing import TYPE_CHECKING

from specdec.doctor.findings import Finding, Level

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PROJECT = "specdec-lab"


def installation(project: str = PROJECT) -> Iterator[Finding]:
    """Python and every package against the ranges that the installed distribution declares."""
    try:
        own = distribution(project)
    except PackageNotFoundError:
        fact = "not installed, so no version is checked"
        yield Finding(Level.WARN, project, fact, "pip install -e . in the checkout")
        return
    yield Finding(Level.OK, project, own.version)
    yield python(platform.python_version(), own.metadata["Requires-Python"])
    yield from map(package, requirements(own))
    for name in own.metadata.get_all("Provides-Extra") or ():
        yield extra(name, requirements(own, name))


def requirements(own: Distribution, extra_name: str = "") -> list[Requirement]:
    """What the distribution requires on this machine, or what one of its extras adds."""
    from packaging.requirements import Requirement

    listed = [Requirement(line) for line in own.requires or ()]

    def applies(requirement: Requirement, to: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": to})

    return [line for line in listed if applies(line, extra_name) and not (extra_name and applies(line, ""))]


def python(running: str, allowed: str) -> Finding:
    """The interpreter against `Requires-Python`."""
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(allowed).contains(running, prereleases=True):
        return Finding(Level.OK, "python", f"{running} ({allowed})")
    return Finding(Level.FAIL, "python", f"{running} is outside {allowed}", "make setup PYTHON=python3.13, say")


def package(requirement: Requirement) -> Finding:
    """A package against the range declared for it."""
    found, remedy = installed_version(requirement.name), f"pip install '{requirement.name}{requirement.specifier}'"
    if found is None:
        return Finding(Level.FAIL, requirement.name, "not installed", remedy)
    if not requirement.specifier.contains(found, prereleases=True):
        return Finding(Level.WARN, requirement.name, f"{found} is outside {requirement.specifier}", remedy)
    return Finding(Level.OK, requirement.name, f"{found} ({requirement.specifier})")


def extra(name: str, required: Sequence[Requirement]) -> Finding:
    """What an optional extra lacks. Lacking it is no fault: nothing but what is named after it needs it."""
    lacking = [line for line in map(package, required) if line.level != Level.OK]
    if not lacking:
        return Finding(Level.OK, f"[{name}]", "complete")
    facts = ", ".join(line.subject if line.level == Level.FAIL else f"{line.subject} {line.fact}" for line in lacking)
    level = Level.WARN if any(line.level == Level.WARN for line in lacking) else Level.OK
    return Finding(
        level, f"[{name}]", f"optional, lacks {facts}", f"pip install -e '.[{name}]' in the checkout adds it"
    )


def installed_version(name: str) -> str | None:
    """None where the package is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
