"""Writes a trained draft model as a standalone checkpoint: python -m experiments.export DRAFT FOLDER

DRAFT is the name of a draft that ships with specdec, or a folder that `python -m experiments.distill` has written.
transformers loads the checkpoint as `assistant_model` of `generate`, this toolkit with `drafter=draft_model
drafter.model=FOLDER`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from specdec.distill.export import export_standalone
from specdec.errors import UsageError
from specdec.models.loading.checkpoint import find
from specdec.models.loading.draft_checkpoint import DraftCheckpoint
from specdec.models.loading.model import resolve_dtype


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status."""
    options = _parse(arguments)
    try:
        draft = DraftCheckpoint.find(options.draft)
        out = export_standalone(
            draft,
            find(options.target or draft.target.name, options.revision),
            options.folder,
            dtype=None if options.dtype is None else resolve_dtype(options.dtype),
            check_revision=not options.any_revision,
        )
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{draft.name} is in {out}: drafter=draft_model drafter.model={out}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("draft", help="the name of a shipped draft, or a folder")
    parser.add_argument("folder", type=Path, help="where the checkpoint goes; must be empty or not exist yet")
    parser.add_argument("--target", help="where the target is now (default: the name it was trained under)")
    parser.add_argument("--revision", help="revision of a target on the hub")
    parser.add_argument("--dtype", help="dtype of the weights (default: that of the target's files)")
    parser.add_argument("--any-revision", action="store_true", help="accept a target with other weights")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
