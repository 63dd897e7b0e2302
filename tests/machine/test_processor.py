from __future__ import annotations

import platform
from pathlib import Path

import pytest

from specdec.machine import processor

X86 = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R): Silver
flags\t\t: fpu avx2 avx512f

processor\t: 1
model name\t: another
"""
ARM = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd sve
"""


@pytest.mark.parametrize(
    ("text", "model", "features"),
    [(X86, "Intel(R) Xeon(R): Silver", "fpu avx2 avx512f"), (ARM, None, "fp asimd sve"), (None, None, "")],
)
def test_the_first_core_speaks_for_all(
    text: str | None, model: str | None, features: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(processor, "_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(platform, "processor", lambda: "by its own name")
    assert processor.cpu_model() == (model or "by its own name")
    assert processor.features() == features
