"""A flow's checkpoint: damage, other versions and other flows are refused; no moment of a kill loses the one before."""

import hashlib
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.support.population import killed_writing
from tests.support.rows import every_row

from massieu.errors import InputError
from massieu.population import CloudMoments, Flow, ResampledLayer


def halve(points):
    return points / 2


def build(depth=2):
    return Flow(halve, depth=depth, observables=[CloudMoments()])


def written(folder, flow=None):
    points = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (flow or build()).run(points, checkpoint=folder)
    (path,) = folder.iterdir()
    return path


def content(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118


def test_any_changed_bit_is_noticed(tmp_path):
    path = written(tmp_path / "flow")
    whole = path.read_bytes()
    draw = random.Random(0)
    places = [*range(16), *(draw.randrange(len(whole)) for _ in range(60)), len(whole) - 1]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"is damaged|is a checkpoint of format"):
            build().resume(path.parent)
    for length in (0, 7, 8, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match="is damaged"):
            build().resume(path.parent)
    path.write_bytes(whole)
    assert build().resume(path.parent).complete


@every_row("name", ["particles", "generator.0", "lineage"])
def test_a_tensor_put_in_place_of_another_is_noticed(name, tmp_path):
    def built():
        generator = torch.Generator().manual_seed(5)
        return Flow(
            ResampledLayer.create(generator=generator, scale=0.3, step_size=0.4), depth=2, observables=[CloudMoments()]
        )

    path = written(tmp_path / name, built())
    tensors, entries = content(path)
    other = tensors[name].clone()
    other.reshape(-1)[0] = torch.nan if other.is_floating_point() else other.reshape(-1)[0] ^ 1
    save_file(tensors | {name: other}, path, entries)
    with pytest.raises(InputError, match="is damaged: its content is not what was written, by its checksum"):
        built().resume(path.parent)


def signed(path, change):
    """The file with its record changed, and a checksum that fits: by the definition, in this test's own words."""
    tensors, entries = content(path)
    record = json.loads(entries["massieu flow"])
    change(record)
    text = json.dumps(record)
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(f"\n{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
        digest.update(tensors[name].numpy().tobytes())
    save_file(tensors, path, {"massieu flow": text, "sha256": digest.hexdigest()})


@every_row(
    ("change", "message"),
    [
        (lambda r: r.update(format=1), r"format 1, and this version of massieu reads format 2: run the flow anew"),
        (lambda r: r.update(format=3), r"format 3, and this version"),
        (lambda r: r["settings"].update(depth=9), "another flow: depth differ"),
        (lambda r: r["settings"].update(observables=[]), "another flow: observables differ"),
        (lambda r: r["settings"].update(processes=2), "another flow: processes differ"),
        (lambda r: r["settings"].update(generators=["cuda"]), "another flow: generators differ"),
        (
            lambda r: r["settings"].update(tokens=7),
            r"has 5 tokens after 2 layers; by its name and its start they are 7",
        ),
        (lambda r: r.update(done=1), r"has 5 tokens after 1 layers; by its name and its start they are 5 after 2"),
        (lambda r: r["settings"].update(device="cuda:63"), "on the device cuda:63, which cannot be used here"),
        (lambda r: r["settings"].update(device="abacus"), "on the device abacus, which cannot be used here"),
    ],
)
def test_what_does_not_fit_is_named(change, message, tmp_path):
    path = next((tmp_path / "flow").iterdir()) if (tmp_path / "flow").exists() else written(tmp_path / "flow")
    whole = path.read_bytes()
    signed(path, lambda record: None)
    assert path.read_bytes() == whole or build().resume(path.parent).complete
    signed(path, change)
    try:
        with pytest.raises(InputError, match=message):
            build().resume(path.parent)
    finally:
        path.write_bytes(whole)


def test_what_a_killed_process_left_beside_the_file_is_removed(tmp_path):
    folder = tmp_path / "flow"
    folder.mkdir()
    (folder / ".massieu-process-00000-0123456789abcdef").write_bytes(b"half")
    (folder / ".massieu-process-00001-0123456789abcdef").write_bytes(b"of another process")
    build().run(torch.ones(4, 2), checkpoint=folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        ".massieu-process-00001-0123456789abcdef",
        "process-00000-layer-00002.safetensors",
    ]


@pytest.mark.slow
def test_killed_at_any_moment_of_writing_it_goes_on(tmp_path):
    arguments = [sys.executable, "-m", "tests.support.population.killed_writing", str(tmp_path)]
    told = subprocess.run(arguments, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True).stdout
    assert told.splitlines() == [f"{moment} {int(signal.SIGKILL)}" for moment in killed_writing.MOMENTS]
    whole = killed_writing.build().run(killed_writing.cloud())
    for moment in killed_writing.MOMENTS:
        resumed = killed_writing.build().resume(tmp_path / moment)
        assert repr(resumed.rows) == repr(whole.rows), moment
        assert torch.equal(resumed.particles, whole.particles), moment
        assert [path.name for path in (tmp_path / moment).iterdir()] == ["process-00000-layer-00004.safetensors"]
