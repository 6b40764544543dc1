"""Compiled kernels on disk: one file a kernel, named by its key.

A file is a line with a checksum, a line of JSON that says what the kernel is, and the object code. It is written beside
its place and renamed, so a reader sees all of it or nothing, and a file whose checksum does not fit counts as absent.
A lock a key lets one process compile while the others wait; it saves work and guards nothing, so where it cannot be had
(no lock on this file system, a read-only folder, a holder that does not come back) the work is done without it.
"""

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"fa3-kernel-1 "
SUFFIX = ".kernel"
LOCK_SECONDS = 120.0  # far more than a compile takes
LEFTOVER_SECONDS = 3600.0  # a temporary file of this age belongs to a process that was killed


class Settings(NamedTuple):
    """What the environment says."""

    directory: Path  # FA3_CACHE_DIR, else the platform's cache folder for this user
    quiet: bool  # FA3_QUIET, anything but empty or 0: no line when a compile takes long


class Entry(NamedTuple):
    """A kernel on disk, as it is shown."""

    key: str
    entry: str
    spec: str
    config: str
    bytes: int
    path: Path


def settings() -> Settings:
    """Read at each use, so that a program may set the variables after it imported this."""
    folder = os.environ.get("FA3_CACHE_DIR") or _folder_of_user()
    try:
        directory = Path(folder).expanduser()
    except RuntimeError as error:
        raise ValueError(f"FA3_CACHE_DIR is {folder!r}: {error}") from None
    return Settings(directory, os.environ.get("FA3_QUIET", "") not in ("", "0"))


def _folder_of_user() -> str:
    import platformdirs

    return platformdirs.user_cache_dir("fa3", appauthor=False)


def path(key: str) -> Path:
    return settings().directory / f"{key}{SUFFIX}"


def read(key: str) -> bytes | None:
    """The object code kept under `key`; None where there is none or the file is damaged."""
    found = _open(path(key))
    return found[1] if found and found[0].get("key") == key else None


def write(key: str, spec: Any, config: Any, code: bytes) -> Path:
    """Keep `code` under `key`. Raises OSError where the folder cannot be written."""
    place = path(key)
    place.parent.mkdir(parents=True, exist_ok=True)
    about = {"key": key, "entry": spec.entry, "spec": repr(spec), "config": repr(config)}
    body = json.dumps(about).encode() + b"\n" + code
    draft = place.with_name(f"{key}.{uuid.uuid4().hex}.tmp")
    try:
        draft.write_bytes(MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        os.replace(draft, place)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    _sweep(place.parent)
    return place


@contextlib.contextmanager
def lock(key: str) -> Iterator[None]:
    """One process at a time; see the module's docstring for when it lets several through."""
    import filelock  # NOTE: 13 ms, which a kernel that is there need not wait for

    held = None
    with contextlib.suppress(OSError, NotImplementedError):
        settings().directory.mkdir(parents=True, exist_ok=True)
        waiting = filelock.FileLock(settings().directory / f"{key}.lock", timeout=LOCK_SECONDS, poll_interval=0.02)
        waiting.acquire()
        held = waiting
    try:
        yield
    finally:
        if held is not None:
            held.release()


def entries() -> list[Entry]:
    """Every sound kernel in the folder, ordered by what it is."""
    listed = []
    for file in _files(SUFFIX):
        found = _open(file)
        if found and found[0].get("key") == file.stem:
            about, code = found
            listed.append(Entry(file.stem, about["entry"], about["spec"], about["config"], len(code), file))
    return sorted(listed, key=lambda e: (e.entry, e.spec, e.config, e.key))


def clear() -> int:
    """Remove every kernel from the folder, and only those files that this module wrote; how many kernels there were."""
    kernels = _files(SUFFIX)
    for file in [*kernels, *_files(".lock"), *_files(".tmp")]:
        if not file.is_dir():
            file.unlink(missing_ok=True)
    return len(kernels)


def _open(file: Path) -> tuple[dict[str, str], bytes] | None:
    """What the file says it is, and its object code; None if it is not whole."""
    try:
        head, body = file.read_bytes().split(b"\n", 1)
        if head != MAGIC + hashlib.sha256(body).hexdigest().encode():
            return None
        about, code = body.split(b"\n", 1)
        said = json.loads(about)
    except (OSError, ValueError):
        return None
    return (said, code) if isinstance(said, dict) and {"key", "entry", "spec", "config"} <= said.keys() else None


def _files(suffix: str) -> list[Path]:
    """Ours are named by a key: anything else in the folder is somebody else's."""
    hexadecimal = "[0-9a-f]" * 64
    return sorted(settings().directory.glob(f"{hexadecimal}*{suffix}"))


def _sweep(folder: Path) -> None:
    for draft in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - draft.stat().st_mtime > LEFTOVER_SECONDS:
                draft.unlink()
