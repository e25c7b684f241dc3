"""Small results that are saved to a folder; a process that does nothing else loads this file, and no test's."""

import json
from collections.abc import Mapping
from pathlib import Path

from massieu.storage import folder as folders

NAMES = ("one", "two", "three")
RECORD = "run.json"


def files(content: str) -> dict[str, bytes]:
    return {name: f"{name} {content}".encode() for name in NAMES}


def record_of(listed: Mapping[str, bytes]) -> bytes:
    hashes = {name: folders.digest(content) for name, content in listed.items()}
    return json.dumps({"schema_version": 1, "files": hashes}).encode()


def save(folder: Path, listed: dict[str, bytes], linked: Mapping[str, Path] = {}) -> None:
    named = listed | {name: path.read_bytes() for name, path in linked.items()}
    folders.save(folder, RECORD, {**listed, RECORD: record_of(named)}, linked)


def save_often(folder: str, who: str, times: int) -> None:
    for number in range(times):
        save(Path(folder), files(f"{who}{number}"))
