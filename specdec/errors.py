"""The one exception type for mistakes a user can mend."""

from __future__ import annotations


class UsageError(ValueError):
    """Bad input. The message is one sentence that names the value and the way out."""


class ModelError(RuntimeError):
    """A model gave something no distribution can be made of. Names the model, the request and the step."""
