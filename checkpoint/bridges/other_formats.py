"""Describe a folder without a checkpoint: what it holds instead, and how to load that."""

from __future__ import annotations

from pathlib import Path

NOTHING = "it has no commits/e*-s*.json"


def instead(where: str) -> str:
    """Describe a place without a commit, and name the remedy.

    Args:
        where: a store's description of itself, an absolute path if it is a folder.
    """
    path = Path(where)
    if not path.is_absolute():
        return NOTHING
    if path.is_file():
        return "it is a file; give the folder that was saved to"
    if not path.exists():
        return "there is no such folder"
    if (path / "checkpoints" / "commits").is_dir():
        return f"it is a run's folder; give {path / 'checkpoints'}"
    if path.name == "commits" and any(path.glob("e*-s*.json")):
        return f"it is a part of a checkpoint's folder; give {path.parent}"
    if (path / ".metadata").is_file():
        return "torch.distributed.checkpoint has written it; import_dcp() reads that"
    if any(path.glob("*.safetensors")):
        return "it has files of safetensors; import_hf() reads them"
    return NOTHING
