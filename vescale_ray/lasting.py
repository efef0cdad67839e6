"""Checks that a folder outlives the job, the session and the node that write into it.

``ray job submit --working-dir`` unpacks the submitted folder into Ray's package cache, where the job's working directory then is. A
relative path there names a folder that no other submission sees, and that Ray deletes when it needs room.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from vescale_ray.errors import BadInput

_PACKAGE = re.compile(r"_ray_pkg_[0-9a-f]+|working_dir_files|py_modules_files")
_SESSION = re.compile(r"session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d+_\d+")
_ON_A_DISK = re.compile(r"(file|local)://")
_ONE_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)", re.IGNORECASE)
_VARIABLE = re.compile(r"(?:^|/)(\$\w+|\$\{\w+\})")
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders of one machine alone, whatever ``TMPDIR`` is."""
REMEDY = "give an absolute path on storage that all nodes share"


class NotLasting(BadInput):
    """The folder is deleted with the job or with Ray's session. The message is one sentence with its absolute path and the remedy."""


def misread(path: str | os.PathLike[str]) -> str | None:
    """Return the reason and the remedy if the path is most likely not the one that the user meant, else None."""
    text = os.fspath(path)
    if _ONE_SLASH.match(text):
        meant = text.replace(":/", ":///" if text.startswith(("file:", "local:")) else "://", 1)
        return f"a URL has two slashes (pathlib.Path removes one of them); give {meant}, as text"
    if (found := _VARIABLE.search(text)) is not None:
        return f"{found[1]} is a variable of the shell, which is not replaced here; give its value"
    if text.startswith("~") and os.path.expanduser(text) == text:
        return f"{text.partition('/')[0]} is not a home folder of this machine; give an absolute path"
    return None


def whole(path: str | os.PathLike[str]) -> str:
    """Return ``path`` as an absolute path without ``~`` and links; any URL except ``file://`` and ``local://`` is returned unchanged."""
    text = _ON_A_DISK.sub("", os.fspath(path))
    return text if "://" in text else str(Path(os.path.expanduser(text)).resolve())


def goes_with(path: str | os.PathLike[str]) -> str | None:
    """Describe the folder of Ray's that contains ``path`` and is deleted with a job or a cluster; None if there is no such folder."""
    text = whole(path)
    parts = () if "://" in text else Path(text).parts
    if any(_PACKAGE.fullmatch(part) for part in parts):
        return "the package that Ray has unpacked for this job, which no other submission sees"
    return "the folder of a Ray session, which is deleted with the cluster" if any(_SESSION.fullmatch(part) for part in parts) else None


def check_lasting(what: str, path: str | os.PathLike[str], remedy: str = REMEDY) -> None:
    """Raise NotLasting for a folder in a package or session of Ray, and BadInput for a path that most likely means another folder.

    Args:
        what: the setting that names the folder, for the message.
    """
    if (wrong := misread(path)) is not None:
        raise BadInput(f"{what}: {wrong}")
    reason = goes_with(path)
    if reason is not None:
        raise NotLasting(f"{what}: {whole(path)} lies in {reason}; {remedy}")


def in_temporary_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether the folder is in this machine's folder for temporary files, which other nodes do not see and a new pod lacks."""
    text = whole(path)
    folders = (tempfile.gettempdir(), *_TEMPORARY)
    return "://" not in text and any(Path(text).is_relative_to(Path(folder).resolve()) for folder in folders)
