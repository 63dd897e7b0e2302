"""The version, as the code itself states it: the same whether installed or only on the path."""

from __future__ import annotations

__version__ = "0.2.0"
